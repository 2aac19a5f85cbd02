"""Measures step costs on a GPU: every step program at several batches and contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts, programs_digest
from specbuild.runtime.draft.draft_models import model_of, rows_per_sequence_of, shape_text
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import TARGET, ProgramEntry
from specbuild.runtime.measure.benchmark_batch import (
    BenchmarkBatch,
    benchmark_batch,
    cuda_executor,
    tokens_left,
)
from specbuild.runtime.measure.graph_timing import time_prefixes, time_program
from specbuild.runtime.measure.step_timing import sparse_at, step_sections

MEASURING_BUDGET_S = 60.0
CONTEXTS = (64, 1024, 8192, 32768)
REPEATS = 8
# A longest context within this factor of another measured one is skipped.
_DISTINCT = 1.25
# The number of steps before and during timing: a sequence that has ended reads nothing.
_STEPS_OF_MARGIN = 12
# Longer prompts take more time per token, so the expected time of a fill is scaled up.
_FILL_MARGIN = 1.5

Progress = Callable[[str], None]


def contexts_of(max_seq_len: int, depth: int) -> tuple[int, ...]:
    """Return the measured contexts: those of ``CONTEXTS`` that fit, and the longest."""
    longest = max_seq_len - min(_STEPS_OF_MARGIN * (depth + 1), max_seq_len // 2)
    fitting = [context for context in CONTEXTS if context <= longest]
    if not fitting or longest > _DISTINCT * fitting[-1]:
        fitting.append(longest)
    return tuple(fitting)


def measure_step_costs(
    engine: Engine,
    progress: Progress,
    *,
    budget_s: float = MEASURING_BUDGET_S,
    repeats: int = REPEATS,
) -> StepCosts:
    """Time every step program for each batch and context, small contexts and batches first.

    For each batch and context, sequences of random tokens are placed once, and all drafts are timed
    from the same state. ``progress`` is called with a line for each. After about ``budget_s``
    seconds the remaining points are skipped, except for the first context; longer contexts are then
    extrapolated. Raises UnsupportedHereError if the engine's steps run on the host.
    """
    executor = cuda_executor(engine)
    table = ProgramTable(executor.plan)
    points = _Points(engine, table, repeats)
    deadline_s, fill_s_per_token = perf_counter() + budget_s, 0.0
    limits, depths = engine.manifest.limits, [shape.draft_depth for shape in table.shapes()]
    contexts = contexts_of(limits.max_seq_len, max([*depths, table.max_host_chain]))
    batches = sorted({min(batch, limits.max_batch_size) for batch in table.step_batches()})
    for context in contexts:
        for batch in batches:
            remaining_s = deadline_s - perf_counter()
            expected_s = fill_s_per_token * batch * context * _FILL_MARGIN
            if context > contexts[0] and expected_s > remaining_s:
                progress(f"batch {batch}, context {context}: left out, no time")
                continue
            if not tokens_left(engine, batch=batch, context=context):
                progress(f"batch {batch}, context {context}: left out, too few cache pages")
                continue
            started_s = perf_counter()
            with benchmark_batch(engine, batch=batch, context=context, shape=None) as placed:
                fill_s_per_token = (perf_counter() - started_s) / (batch * context)
                parts = points.measure(placed, context)
            progress(f"batch {batch}, context {context}: {parts}")
    return StepCosts(
        gpu=executor.runner.gpu.facts.name,
        programs=programs_digest(engine.manifest),
        method=METHOD,
        steps=points.costs(),
    )


@dataclass
class _Points:
    """The times so far: lists of (context, step, draft) by batch, draft, and host proposal."""

    engine: Engine
    table: ProgramTable
    repeats: int
    times: dict[tuple[int, DraftShape | None, bool], list[tuple[int, float, float]]] = field(
        default_factory=dict
    )
    _drafting: dict[str, int] = field(default_factory=dict)

    def measure(self, placed: BenchmarkBatch, context: int) -> str:
        """Time all drafts at one batch and context; return a summary."""
        parts = []
        for shape in (None, *self.table.shapes()):
            if self.table.max_sequences(shape, full_logits=False) < placed.batch:
                continue
            entry = self.table.step(
                shape,
                batch=placed.batch,
                full_logits=False,
                sparse=sparse_at(self.engine, context),
            )
            step_s = self._time(placed, entry, (placed.batch, shape, False), context)
            parts.append(f"{_name(shape)} {step_s * 1e3:.3f}")
        for shape in self.table.ragged_shapes():
            fewest = self.table.min_sequences(shape)
            most = self.table.max_sequences(shape, full_logits=False)
            if fewest <= placed.batch <= most:
                entry = self.table.step(shape, batch=placed.batch, full_logits=False)
                placed.give_rows(entry)
                step_s = self._time(placed, entry, (placed.batch, shape, False), context)
                parts.append(f"{shape_text(shape)} {step_s * 1e3:.3f}")
        for length in self.table.host_chain_lengths(batch=placed.batch, full_logits=False):
            lengths = [length] * placed.batch
            entry = self.table.host_chain_step(lengths, batch=placed.batch, full_logits=False)
            placed.offer(entry)
            shape = DraftShape(1, length, length)
            step_s = self._time(placed, entry, (placed.batch, shape, True), context)
            parts.append(f"host proposal of {length} {step_s * 1e3:.3f}")
        return ", ".join(parts) + " ms"

    def _time(
        self,
        placed: BenchmarkBatch,
        entry: ProgramEntry,
        key: tuple[int, DraftShape | None, bool],
        context: int,
    ) -> float:
        """Return the seconds of a complete step, and store them."""
        runner = placed.executor.runner
        step_s = time_program(runner, entry, self.repeats, reset=placed.reset)
        draft_s, count = 0.0, self._draft_launches(placed, entry)
        if count:
            [draft_s] = time_prefixes(runner, entry, [count], self.repeats, reset=placed.reset)
        self.times.setdefault(key, []).append((context, step_s, min(draft_s, step_s)))
        return step_s

    def costs(self) -> tuple[ShapeCosts, ...]:
        """Return the table's entries, by batch; host proposals follow the device's drafts."""
        entries = []
        for (batch, shape, host_proposal), points in self.times.items():
            contexts, step_s, draft_s = zip(*points, strict=True)
            sizes = shape or DraftShape(0, 0, 0)
            entries.append(
                ShapeCosts(
                    batch,
                    sizes.draft_top_k,
                    sizes.draft_depth,
                    sizes.draft_tokens,
                    contexts=contexts,
                    step_s=step_s,
                    draft_s=draft_s,
                    host_proposal=host_proposal,
                    drafter=model_of(sizes),
                    rows_per_sequence=rows_per_sequence_of(sizes),
                )
            )
        return tuple(sorted(entries, key=lambda c: (c.batch, c.host_proposal)))

    def _draft_launches(self, placed: BenchmarkBatch, entry: ProgramEntry) -> int:
        """Return the number of launches of a step before those of the target."""
        if entry.draft_depth == 0:
            return 0
        if entry.name not in self._drafting:
            runner = placed.executor.runner
            sections = step_sections(runner.described(entry).ops)
            first = next(section.first for section in sections if section.name == TARGET)
            count = sum(launch.op < first for launch in runner.launches(entry))
            self._drafting[entry.name] = count
        return self._drafting[entry.name]


def _name(shape: DraftShape | None) -> str:
    if shape is None:
        return "no draft"
    return shape_text(shape)
