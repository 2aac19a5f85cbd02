"""Times the phases of decoding steps and of prompts, with the bytes that they must read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.report import KernelTime, LayerLaunch, Phase, phase_of
from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.draft_models import by_model, model_of
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import TARGET, OpCall, level_section
from specbuild.runtime.measure.anatomy import StepAnatomy
from specbuild.runtime.measure.benchmark_batch import (
    BenchmarkBatch,
    benchmark_batch,
    cuda_executor,
    tokens_left,
)
from specbuild.runtime.measure.byte_floor import (
    BytesByPart,
    EngineTraffic,
    PassTraffic,
    Work,
)
from specbuild.runtime.measure.graph_timing import profile_program
from specbuild.runtime.measure.step_timing import (
    MeasuredStep,
    measure_anatomy,
    measure_prompt_anatomy,
    measure_step,
    sparse_at,
)

# The sweeps that time steps of placed sequences.
STEP_SWEEPS = ("decode", "verify", "draft", "profile", "anatomy")
# Tokens after the context, which the timed steps emit.
MARGIN_TOKENS = 128
# A context this close to the engine's maximum replaces it.
_NEARLY = 0.9
# The repeats of a profile for each prefix of launches.
_PROFILE_REPEATS = 8

Emit = Callable[[Phase], None]


@dataclass(frozen=True)
class StepSweep:
    """Steps of an engine; ``sweeps`` are the requested ones of ``STEP_SWEEPS``.

    ``kernels`` collects the profile of the first batch and context, ``timeline`` one layer of each
    of its steps, and ``anatomies`` those of the first batch and context.
    """

    engine: Engine
    traffic: EngineTraffic
    ceiling_bytes_per_s: float | None
    sweeps: Sequence[str]
    repeats: int = 30
    kernels: list[KernelTime] = field(default_factory=list)
    timeline: list[LayerLaunch] = field(default_factory=list)
    anatomies: list[StepAnatomy] = field(default_factory=list)

    def run(
        self, batches: Sequence[int], contexts: Sequence[int], budget: Budget, emit: Emit
    ) -> None:
        """Measure every context with every batch, without a draft and with every tree."""
        for context in self._within_limits(contexts, budget):
            for batch in batches:
                what = f"batch {batch}, context {context}"
                remaining = tokens_left(self.engine, batch=batch, context=context)
                if (
                    self._wants(batch)
                    and budget.allows_pages(what, remaining)
                    and budget.allows(what, prompt_tokens=batch * context)
                ):
                    self._placed(batch, context, budget, emit)

    def _wants(self, batch: int) -> bool:
        """Return whether any measurement of this batch remains."""
        drafted = self._wants_drafts and bool(self._shapes(batch))
        launches = self._wants_profile or self._wants_anatomy
        return drafted or "decode" in self.sweeps or launches

    @property
    def _wants_drafts(self) -> bool:
        return bool({"verify", "draft"} & set(self.sweeps))

    @property
    def _wants_profile(self) -> bool:
        return "profile" in self.sweeps and not self.kernels

    @property
    def _wants_anatomy(self) -> bool:
        return "anatomy" in self.sweeps and not self.anatomies

    @property
    def _longest(self) -> int:
        limit = self.engine.manifest.limits.max_seq_len
        return max(1, limit - min(MARGIN_TOKENS, limit // 2))

    def _within_limits(self, contexts: Sequence[int], budget: Budget) -> list[int]:
        candidates: list[int] = []
        for i, context in enumerate(contexts):
            if i == 0 or self._longest >= _NEARLY * context:
                candidates.append(min(context, self._longest))
            else:
                budget.left_out.append(
                    f"context {context}: the engine takes {self._longest} and {MARGIN_TOKENS} more"
                )
        return list(dict.fromkeys(candidates))

    def _placed(self, batch: int, context: int, budget: Budget, emit: Emit) -> None:
        shapes = self._shapes(batch) if set(self.sweeps) - {"decode"} else []
        started_s = perf_counter()
        with benchmark_batch(
            self.engine, batch=batch, context=context, shape=shapes[-1] if shapes else None
        ) as placed:
            budget.took_up(batch * context, perf_counter() - started_s)
            if "decode" in self.sweeps:
                self._decode(placed, emit)
            timed = shapes if "verify" in self.sweeps else shapes[-1:]
            for shape in timed if self._wants_drafts else ():
                if budget.allows(f"batch {batch}, context {context}, {tree_text(shape)}"):
                    self._drafted(placed, shape, emit, levels=shape == shapes[-1])
            if self._wants_profile:
                for step in (None, *shapes[-1:]):
                    self._profile(placed, step)
            if self._wants_anatomy:
                for step in (None, *shapes[-1:]):
                    self.anatomies.append(self._anatomy(placed, step))
                if batch == 1 and budget.allows(f"anatomy of a prompt of {context} tokens"):
                    self.anatomies.append(
                        measure_prompt_anatomy(placed, bytes_per_s=self.ceiling_bytes_per_s)
                    )

    def _shapes(self, batch: int) -> list[DraftShape]:
        return shapes_for(ProgramTable(cuda_executor(self.engine).plan), batch)

    def _decode(self, placed: BenchmarkBatch, emit: Emit) -> None:
        for sparse, name in self._ways(placed):
            step = measure_step(
                self.engine, placed, None, repeats=self.repeats, idle=True, sparse=sparse
            )
            work = self._work(step, placed.batch, placed.batch)
            traffic = self.traffic.verifying(sparse=sparse)
            row = self._phase("decode", f"no draft{name}", step, work, step.step_s, traffic=traffic)
            emit(replace(row, tokens_per_s=placed.batch / step.step_s, idle_s=step.idle_s))

    def _ways(self, placed: BenchmarkBatch) -> list[tuple[bool, str]]:
        """Yield how steps attend there: to everything and, with DSA, to selected tokens."""
        ways = [(False, "")]
        if sparse_at(self.engine, placed.context):
            ways.append((True, ", chosen tokens"))
        return ways

    def _drafted(
        self, placed: BenchmarkBatch, shape: DraftShape, emit: Emit, *, levels: bool
    ) -> None:
        for sparse, way in self._ways(placed):
            self._verified(placed, shape, emit, levels=levels and not way, sparse=sparse, way=way)

    def _verified(
        self,
        placed: BenchmarkBatch,
        shape: DraftShape,
        emit: Emit,
        *,
        levels: bool,
        sparse: bool,
        way: str,
    ) -> None:
        step = measure_step(
            self.engine, placed, shape, repeats=self.repeats, idle=levels, sparse=sparse
        )
        name, batch = f"{tree_text(shape)}{way}", placed.batch
        model_traffic = self.traffic.of(model_of(shape))
        traffic = model_traffic.verifying(sparse=sparse)
        work = self._work(step, batch * (shape.draft_tokens + 1), batch)
        added = {section.name: section.added_s for section in step.sections}
        if "verify" in self.sweeps:
            emit(self._phase("verify", name, step, work, added[TARGET], traffic=traffic))
            floor = model_traffic.step(
                work, top_k=shape.draft_top_k, depth=shape.draft_depth, sparse=sparse
            )
            row = self._phase(
                "verify", f"{name}, whole step", step, work, step.step_s,
                floor=floor, traffic=traffic,
            )  # fmt: skip
            emit(replace(row, idle_s=step.idle_s))
        if "draft" in self.sweeps and levels:
            self._levels(placed.batch, step, shape, emit)

    def _profile(self, placed: BenchmarkBatch, shape: DraftShape | None) -> None:
        runner, table = placed.executor.runner, ProgramTable(placed.executor.plan)
        sparse = sparse_at(self.engine, placed.context)
        entry = table.step(shape, batch=placed.batch, full_logits=False, sparse=sparse)
        launches = profile_program(runner, entry, _PROFILE_REPEATS, reset=placed.reset)
        added_s: dict[str, list[float]] = defaultdict(list)
        for launch in launches:
            added_s[launch.kernel].append(launch.added_s)
        name = draft_text(shape)
        rows = [
            KernelTime(name, placed.batch, kernel, len(times), sum(times))
            for kernel, times in added_s.items()
        ]
        self.kernels.extend(sorted(rows, key=lambda row: -row.added_s))
        ops, layers = runner.described(entry).ops, self.engine.manifest.target.layers
        layer, layer_ops = middle_layer(ops, layers)
        self.timeline.extend(
            LayerLaunch(name, placed.batch, layer, ops[time.op].op, time.kernel, time.added_s)
            for time in launches
            if time.op in layer_ops
        )

    def _anatomy(self, placed: BenchmarkBatch, shape: DraftShape | None) -> StepAnatomy:
        return measure_anatomy(
            self.engine, placed, shape,
            draft=draft_text(shape), bytes_per_s=self.ceiling_bytes_per_s, repeats=_PROFILE_REPEATS,
        )  # fmt: skip

    def _work(self, step: MeasuredStep, rows: int, batch: int) -> Work:
        return Work(rows, batch, step.context, experts=step.experts)

    def _levels(self, batch: int, step: MeasuredStep, shape: DraftShape, emit: Emit) -> None:
        """Yield the time that each level of a draft adds to a step, or the pass that drafts all
        levels.
        """
        traffic = self.traffic.of(model_of(shape))
        added = {section.name: section.added_s for section in step.sections}
        timed = [n for n in range(1, shape.draft_depth + 1) if level_section(n) in added]
        of_one_pass = len(timed) < shape.draft_depth
        for level in timed:
            rows = batch * (1 if level == 1 else shape.draft_top_k)
            if of_one_pass:
                rows = batch * shape.draft_depth
            work = Work(rows, batch, step.context, experts=0.0)
            draft = traffic.first_level if level == 1 else traffic.further_level
            assert draft is not None
            title = f"{tree_text(shape)}, {'pass' if of_one_pass else f'level {level}'}"
            time_s, floor = added[level_section(level)], traffic.level(level, work)
            emit(self._phase("draft", title, step, work, time_s, floor=floor, traffic=draft))

    def _phase(
        self,
        sweep: str,
        name: str,
        step: MeasuredStep,
        work: Work,
        time_s: float,
        *,
        floor: BytesByPart | None = None,
        traffic: PassTraffic | None = None,
    ) -> Phase:
        traffic = traffic or self.traffic.target
        return phase_of(
            sweep,
            name,
            work,
            time_s=time_s,
            floor=floor or traffic.bytes_read(work),
            operations=traffic.floating_operations(work),
            experts=traffic.distinct_experts(work),
            experts_measured=step.experts is not None,
            ceiling_bytes_per_s=self.ceiling_bytes_per_s,
        )


def shapes_for(table: ProgramTable, batch: int) -> list[DraftShape]:
    """Return the trees with steps for this batch, the deepest chain last."""
    able = [s for s in table.shapes() if table.max_sequences(s, full_logits=False) >= batch]
    return sorted(able, key=lambda s: (-s.draft_top_k, s.draft_depth))


def draft_text(speculation: Speculation) -> str:
    """Return ``no draft``, ``default``, or the tree."""
    if speculation is None:
        return "no draft"
    return "default" if speculation == "default" else tree_text(speculation)


def tree_text(shape: DraftShape) -> str:
    """Return ``chain of 3`` or ``tree of 12 (3 wide, 4 deep)``; of several drafts the name too."""
    by, wide, deep = by_model(shape), shape.draft_top_k, shape.draft_depth
    if wide == 1:
        return f"chain of {deep}{by}"
    return f"tree of {shape.draft_tokens} ({wide} wide, {deep} deep){by}"


def middle_layer(ops: Sequence[OpCall], layers: int) -> tuple[int, range]:
    """Return a layer in the middle of the target, from 0, and the indices of its ops in ``ops``.

    An op that a step calls exactly ``layers`` times marks the start of each layer. There are no
    indices without such an op, or without a following layer.
    """
    layer = (layers - 1) // 2
    target = [place for place, op in enumerate(ops) if op.section == TARGET]
    calls = Counter(ops[place].op for place in target)
    mark = next((ops[place].op for place in target if calls[ops[place].op] == layers), None)
    if mark is None or layers < 2:
        return layer, range(0)
    begins = [place for place in target if ops[place].op == mark]
    return layer, range(begins[layer], begins[layer + 1])
