"""``bench sweep ENGINE specpv``: steps over partial views against steps over the full cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import KernelTime, Phase, phase_of
from specbuild.cli.bench.steps import MARGIN_TOKENS, Emit, tree_text
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.lossy.specpv.host_tables import view_geometry
from specbuild.runtime.lossy.specpv.state import ViewGeometry
from specbuild.runtime.measure.benchmark_batch import (
    BenchmarkBatch,
    benchmark_batch,
    cuda_executor,
    tokens_left,
)
from specbuild.runtime.measure.byte_floor import BytesByPart, EngineTraffic, Work
from specbuild.runtime.measure.graph_timing import profile_program, time_program
from specbuild.runtime.measure.routed_experts import experts_touched

VIEW_SWEEP = "specpv"
# The compared budgets, in retrieved tokens.
RETRIEVED_TOKENS = (512, 1024, 2048, 4096, 8192)
# The acceptance rate of each draft level, for token rates.
ACCEPTED_A_LEVEL = 0.7
# The share of a buffer that a full step re-verifies, averaged with early ones.
BUFFER_SHARE = 0.75
_PROFILE_REPEATS = 8

State = Mapping[str, int | np.ndarray]


@dataclass(frozen=True)
class ViewSweep:
    """Steps of an engine with SpecPV, with its deepest chain and with its tree, if it has one.

    Rows of the tree name it. ``kernels`` collects profiles; ``retrieved`` is the number of tokens
    that views retrieve.
    """

    engine: Engine
    traffic: EngineTraffic
    ceiling_bytes_per_s: float | None
    repeats: int = 30
    kernels: list[KernelTime] = field(default_factory=list)
    retrieved: Sequence[int] = RETRIEVED_TOKENS

    def run(
        self, batches: Sequence[int], contexts: Sequence[int], budget: Budget, emit: Emit
    ) -> None:
        """Measure every context with every batch, as far as the engine supports them."""
        geometry, limit = self._geometry, self.engine.manifest.limits.max_seq_len
        threshold = geometry.config.partial_threshold
        for requested in contexts:
            context = min(requested, limit - MARGIN_TOKENS)
            if context < 0.9 * requested or context <= threshold:
                budget.left_out.append(
                    f"specpv at {requested}: views are for {threshold + 1} to "
                    f"{limit - MARGIN_TOKENS} tokens"
                )
                continue
            blocks = self._blocks(context, budget)
            for batch in batches:
                what = f"specpv, batch {batch}, context {context}"
                remaining = tokens_left(self.engine, batch=batch, context=context)
                if budget.allows_pages(what, remaining) and budget.allows(
                    what, prompt_tokens=batch * context
                ):
                    self._placed(batch, context, blocks, budget, emit)

    def _blocks(self, context: int, budget: Budget) -> list[int]:
        """Return the numbers of blocks that views retrieve, ascending, as far as they fit."""
        config = self._geometry.config
        size = config.block_size
        max_blocks = min(config.n_retrieval_blocks, self._geometry.summarised_blocks(context))
        block_counts = {tokens: tokens // size for tokens in self.retrieved}
        budget.left_out += [
            f"specpv, context {context}, {tokens} tokens retrieved: views retrieve "
            f"{size} to {max_blocks * size}"
            for tokens, blocks in block_counts.items()
            if not 1 <= blocks <= max_blocks
        ]
        return sorted({blocks for blocks in block_counts.values() if 1 <= blocks <= max_blocks})

    @property
    def _geometry(self) -> ViewGeometry:
        geometry = view_geometry(self.engine.manifest)
        assert geometry is not None
        return geometry

    def _placed(
        self, batch: int, context: int, blocks: Sequence[int], budget: Budget, emit: Emit
    ) -> None:
        shapes, started_s = self._shapes(batch), perf_counter()
        with benchmark_batch(self.engine, batch=batch, context=context, shape=shapes[0]) as placed:
            budget.took_up(batch * context, perf_counter() - started_s)
            for shape in shapes:
                what = f"specpv, batch {batch}, context {context}{_of_tree(shape)}"
                if shape == shapes[0] or budget.allows(what):
                    _Timing(self, placed, shape, emit).run(blocks)

    def _shapes(self, batch: int) -> list[DraftShape | None]:
        """Return the deepest chain and the tree with steps for this batch."""
        table = ProgramTable(cuda_executor(self.engine).plan)
        able = [s for s in table.shapes() if table.max_sequences(s, full_logits=False) >= batch]
        chains = [shape for shape in able if shape.draft_top_k == 1]
        trees = [shape for shape in able if shape.draft_top_k > 1]
        return [max(chains, key=lambda s: s.draft_depth, default=None), *trees]


def tokens_per_step(shape: DraftShape | None) -> float:
    """Return the mean tokens of a step; for a tree the lower bound, a chain of its depth."""
    depth = 0 if shape is None else shape.draft_depth
    return sum(ACCEPTED_A_LEVEL**level for level in range(depth + 1))


def _of_tree(shape: DraftShape | None) -> str:
    return "" if shape is None or shape.draft_top_k == 1 else f", {tree_text(shape)}"


class _Timing:
    """Measure the rows of one batch, context and draft."""

    def __init__(
        self, sweep: ViewSweep, placed: BenchmarkBatch, shape: DraftShape | None, emit: Emit
    ) -> None:
        self._sweep, self._placed, self._shape, self._emit = sweep, placed, shape, emit
        self._geometry = sweep._geometry
        executor, batch = placed.executor, placed.batch
        table = ProgramTable(executor.plan)
        self._reverified = int(BUFFER_SHARE * self._geometry.config.n_spec_tokens_buf)
        self._step, self._choosing, self._refresh = (
            table.step(shape, batch=batch, full_logits=False, reverified=rows)
            for rows in (None, 0, self._reverified)
        )
        self._length = executor.read("length", rows=batch).copy()
        self._blocks = np.array(
            [self._geometry.summarised_blocks(int(n)) for n in self._length], np.int32
        )

    def run(self, budgets: Sequence[int]) -> None:
        """Yield a full step, the selection of a view alone, views of several sizes, and a mix."""
        exact: State = {"verified_len": self._length, "summarised": self._blocks}
        tree, unseen = _of_tree(self._shape), {**exact, "view_blocks": -1}
        full_row = self._row(f"whole{tree}", self._step, unseen, self._context)
        self._emit(replace(full_row, tokens_per_s=self._rate(full_row.time_s)))
        self._emit(self._row(f"full, with its choice{tree}", self._choosing,
                             {**exact, "full_step": 1}, self._context))  # fmt: skip
        for blocks in budgets:
            self._views(blocks, exact, profile=blocks == budgets[-1])

    def _views(self, blocks: int, exact: State, *, profile: bool) -> None:
        config, batch = self._geometry.config, self._placed.batch
        state = {**exact, "view_blocks": self._blocks, "budget": blocks}
        self._choose({**exact, "full_step": 1, "budget": blocks})
        attended = self._attended_tokens(blocks)
        name = f"{blocks * config.block_size} tokens retrieved{_of_tree(self._shape)}"
        partial = self._row(f"partial, {name}", self._step, state, attended, profile=profile)
        self._emit(partial)
        reverified = self._reverified
        first = np.zeros(batch, np.int32)
        first[0] = 1
        again = {**state, "full_step": first, "verified_len": self._length - reverified * first}
        mean = (self._context + (batch - 1) * attended) / batch
        refresh = self._row(f"refresh of one, {name}", self._refresh, again, mean,
                            reverified=reverified, profile=profile)  # fmt: skip
        self._emit(refresh)
        self._emit(self._mix(name, partial, refresh, reverified))

    def _choose(self, state: State) -> None:
        """Select the view of every sequence for partial steps; a reset does not change it.

        With the tables of a smaller selection, rows would attend to pages that were never written.
        """
        self._reset(state)()
        self._placed.executor.start(self._choosing)

    def _mix(self, name: str, partial: Phase, refresh: Phase, reverified: int) -> Phase:
        """Re-verify ``reverified`` tokens of each sequence in turn: one refresh, several steps."""
        batch = self._placed.batch
        steps = max(1.0, reverified / tokens_per_step(self._shape) / batch)

        def mean(of_partial: float, of_refresh: float) -> float:
            return ((steps - 1) * of_partial + of_refresh) / steps

        time_s = mean(partial.time_s, refresh.time_s)
        read = mean(partial.bytes_total, refresh.bytes_total)
        operations = mean(partial.operations, refresh.operations)
        rate = read / time_s
        ceiling = self._sweep.ceiling_bytes_per_s
        return replace(
            partial,
            name=f"mix, {name}",
            time_s=time_s,
            bytes=BytesByPart(dense=read),
            bytes_total=read,
            bytes_per_s=rate,
            share_of_ceiling=None if ceiling is None else rate / ceiling,
            operations=operations,
            operations_per_s=operations / time_s,
            experts=mean(partial.experts, refresh.experts),
            tokens_per_s=self._rate(time_s),
        )

    @property
    def _context(self) -> float:
        return float(self._length.mean())

    def _rate(self, time_s: float) -> float:
        return self._placed.batch * tokens_per_step(self._shape) / time_s

    def _attended_tokens(self, blocks: int) -> float:
        """Return the tokens of a view: all except the blocks that it omits."""
        hidden = (self._blocks - np.minimum(blocks, self._blocks)).mean()
        return self._context - float(hidden) * self._geometry.config.block_size

    def _row(
        self,
        name: str,
        entry: ProgramEntry,
        state: State,
        attended: float,
        *,
        reverified: int = 0,
        profile: bool = False,
    ) -> Phase:
        """Return a timed step whose full-attention layers read ``attended`` tokens per sequence."""
        runner, reset = self._placed.executor.runner, self._reset(state)
        reset()
        experts = experts_touched(self._placed.executor, entry)
        time_s = time_program(runner, entry, self._sweep.repeats, reset=reset)
        if profile:
            self._profile(name, entry, reset)
        self._placed.reset()
        batch, nodes = self._placed.batch, entry.draft_tokens + 1
        work = Work(batch * nodes + reverified, batch, attended, experts, logit_rows=batch * nodes)
        traffic = self._sweep.traffic
        floor = traffic.step(
            work,
            top_k=entry.draft_top_k,
            depth=entry.draft_depth,
            draft_context=self._context,
        )
        row = phase_of(
            VIEW_SWEEP,
            name,
            work,
            time_s=time_s,
            floor=floor,
            operations=traffic.target.floating_operations(work),
            experts=traffic.target.distinct_experts(work),
            experts_measured=experts is not None,
            ceiling_bytes_per_s=self._sweep.ceiling_bytes_per_s,
        )
        return replace(row, context=self._context)

    def _reset(self, state: State) -> Callable[[], None]:
        """Return the sequences with this state of their views; no full step by default."""
        executor, batch = self._placed.executor, self._placed.batch
        values = {
            name: np.broadcast_to(np.asarray(value, np.int32), (batch,)).copy()
            for name, value in ({"full_step": 0} | dict(state)).items()
        }

        def restore() -> None:
            self._placed.reset()
            for name, value in values.items():
                executor.write(name, value)

        return restore

    def _profile(self, name: str, entry: ProgramEntry, reset: Callable[[], None]) -> None:
        launches = profile_program(
            self._placed.executor.runner, entry, _PROFILE_REPEATS, reset=reset
        )
        added_s: dict[str, list[float]] = defaultdict(list)
        for launch in launches:
            added_s[launch.kernel].append(launch.added_s)
        step = f"{name}, context {self._context:.0f}"
        rows = [
            KernelTime(step, self._placed.batch, kernel, len(times), sum(times))
            for kernel, times in added_s.items()
        ]
        self._sweep.kernels.extend(sorted(rows, key=lambda row: -row.added_s))
