"""Measures the step costs of an engine on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter, groups_of
from specbuild.runtime.cache.state_paths import path_feeds, replayed_inputs
from specbuild.runtime.draft.cost_table import SPREAD, CostTable
from specbuild.runtime.draft.drafter import Drafter, DrafterParts
from specbuild.runtime.draft.registry import kind_of
from specbuild.runtime.draft.tree import chain_trees
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.manifest_check import DECODING_ROLES, TREE_ROLES
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.specpv.host_tables import launch_feeds
from specbuild.runtime.request import GenerateParams, Request, SequenceState
from specbuild.runtime.statistics import RunCounters

MEASURING_BUDGET_S = 0.4
MAX_MEASURED_ROWS = 8
MEASURED_CONTEXT = 128
_ROUNDS = 12
_MIN_ROUNDS = 4
_MEASURED_ROWS = (1, 2, 4, 6, 8, 16, 32, 64)
_MIN_LEVEL_S = 1e-6


class CannotMeasureError(SpecbuildError):
    """There is no capacity to measure in. The message states the reason."""


def times_agree(times_s: Sequence[Sequence[float]]) -> bool:
    """Return whether the two shortest times of each list are close: nothing disturbs them."""
    return all(
        second <= (1 + SPREAD) * first for first, second, *_ in (sorted(each) for each in times_s)
    )


def table_of(
    rows: Sequence[int],
    target_s: Sequence[Sequence[float]],
    step_s: Sequence[Sequence[float]],
    *,
    row_s: float,
    sure: bool,
) -> CostTable:
    """Build the cost table from times of target steps and of full steps.

    ``target_s[i]`` are times with ``rows[i]`` rows, ``step_s[i]`` times with chains of i + 1
    levels. Disturbances only make a step longer, so the shortest time is used. In the table, a step
    is never slower than the next larger one.
    """
    table = CostTable(tuple(rows), _step_minima(target_s), (), row_s, sure)
    level_times = [
        time_s - table.step_s(d) for d, time_s in enumerate(_step_minima(step_s), start=2)
    ]
    return replace(table, draft_s=tuple(max(time_s, _MIN_LEVEL_S) for time_s in level_times))


def _step_minima(times_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the shortest time of each size, or of a larger size if that is shorter."""
    return tuple(accumulate(map(min, reversed(times_s)), min))[::-1]


class CostMeasurement:
    """Times target steps and draft chains on a scratch sequence of random tokens.

    ``record`` describes the drafter. Without a model, only target steps are timed. They have up to
    ``max_rows`` rows, or as many as the deepest timed chain needs.
    """

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        kv: KvPools,
        record: DrafterRecord,
        *,
        max_rows: int = 1,
    ) -> None:
        self._executor = executor
        self._record = record
        self._manifest = manifest
        self._kv = kv
        limits = manifest.limits
        self._context = max(2, min(MEASURED_CONTEXT, limits.max_seq_len // 2))
        # Each proposal adds a token to the draft's cache: two at first, then one per depth and
        # round.
        capacity = limits.max_seq_len - self._context - 2
        deepest = min(limits.levels_of(record.geometry), MAX_MEASURED_ROWS - 1)
        self._depth = min(deepest, capacity - 2) if record.roles else 0
        self._drafts = min(_ROUNDS * self._depth + 2, capacity)
        self._max_rows = max(max_rows, self._depth + 1)
        self._counter = SlotCounter(limits.max_seq_len + limits.draft_tokens + limits.max_rows)
        self._random = np.random.default_rng(0)

    def run(self) -> CostTable:
        """Measure the table; mark it uncertain if the times still vary after the time budget.

        Raises CannotMeasureError if the engine's limits or the free pages leave no capacity.
        """
        if self._depth < 1 and self._record.roles:
            max_seq_len = self._manifest.limits.max_seq_len
            raise CannotMeasureError(f"max_seq_len {max_seq_len} is too short to measure drafts")
        self._executor.prepare((*DECODING_ROLES, *self._record.roles, *TREE_ROLES))
        deadline_s = perf_counter() + MEASURING_BUDGET_S
        rows = self._rows()
        target_s: list[list[float]] = [[] for _ in rows]
        step_s: list[list[float]] = [[] for _ in range(self._depth)]
        sequence = self._scratch_sequence()
        drafter = self._drafter()
        is_certain = False
        try:
            row_s, aux_hidden = self._prefill_context(sequence, drafter)
            for round_number in range((self._drafts - 2) // (self._depth or 1) or _ROUNDS):
                for i, n in enumerate(rows):
                    self._step(sequence, n)
                    target_s[i].append(_timed(self._step, sequence, n))
                for depth in range(1, self._depth + 1):
                    step_s[depth - 1].append(_timed(self._drafted_step, sequence, drafter, depth))
                    drafter.observe(sequence, aux_hidden)
                is_certain = round_number + 1 >= _MIN_ROUNDS and times_agree([*target_s, *step_s])
                if is_certain or (perf_counter() > deadline_s and round_number > 0):
                    break
        finally:
            self._kv.release(sequence.pages)
        return table_of(rows, target_s, step_s, row_s=row_s, sure=is_certain)

    def _rows(self) -> list[int]:
        """The sizes of the timed target steps; the largest fits every chain."""
        widest, chain = self._max_rows, self._depth + 1
        return sorted({n for n in _MEASURED_ROWS if n <= widest} | {chain, widest})

    def _prefill_context(
        self, sequence: SequenceState, drafter: Drafter
    ) -> tuple[float, np.ndarray | None]:
        """Prefill the context.

        Return the draft's time to ingest one token, and the aux hidden state of the last row.
        """
        if not self._depth:
            return 0.0, self._fill(sequence, drafter, self._context)
        # The first call allocates memory; the second ingests as many rows without that cost.
        half, level = -(-self._context // 2), DraftShape(1, 1, 1)
        self._fill(sequence, drafter, half)
        drafter.propose([sequence], level)
        aux_hidden = self._fill(sequence, drafter, self._context)
        many_s = _timed(drafter.propose, [sequence], level)
        drafter.observe(sequence, aux_hidden)
        one_s = _timed(drafter.propose, [sequence], level)
        drafter.observe(sequence, aux_hidden)
        return max(many_s - one_s, 0.0) / (self._context - half), aux_hidden

    def _drafter(self) -> Drafter:
        parts = DrafterParts(self._executor, self._manifest, self._counter, self._record)
        return kind_of(self._record).make(parts)

    def _scratch_sequence(self) -> SequenceState:
        vocab, tokens = self._manifest.target.vocab, self._context + self._drafts + 2
        pages_needed = self._kv.pages_needed(tokens)
        if not self._kv.can_admit(pages_needed):
            raise CannotMeasureError("too few cache pages are free to measure drafts")
        return SequenceState(
            request=Request("cost", (0,), GenerateParams(), 1),
            index=-1,
            ids=self._random.integers(0, vocab, tokens, dtype=np.int32),
            pages=self._kv.admit(pages_needed),
            counters=RunCounters(0),
            text=None,
            num_tokens=self._context + self._drafts + 2,
        )

    def _fill(self, sequence: SequenceState, drafter: Drafter, length: int) -> np.ndarray | None:
        """Prefill up to ``length``; return the aux hidden state of the last row."""
        aux_hidden = None
        while sequence.length < length:
            count = min(length - sequence.length, self._manifest.limits.max_rows)
            aux_hidden = self._launch(sequence, count, tree=False).get("captured")
            sequence.length += count
            for group in groups_of(self._manifest.roles["target"]):
                sequence.pages[group].commit(sequence.length)
            drafter.observe(sequence, aux_hidden)
        return None if aux_hidden is None else aux_hidden[-1:].copy()

    def _drafted_step(self, sequence: SequenceState, drafter: Drafter, depth: int) -> None:
        trees = drafter.propose([sequence], DraftShape(1, depth, depth))
        sampled, outputs = self._verify(sequence, depth + 1)
        self._executor.run("accept", trees.accept_feeds(sampled[None]))
        if self._manifest.state_groups:
            self._executor.run("commit", self._commit_feeds(sequence, outputs))

    def _step(self, sequence: SequenceState, rows: int) -> np.ndarray:
        """Run a target step over a chain; return the token sampled at each row, [rows]."""
        return self._verify(sequence, rows)[0]

    def _verify(
        self, sequence: SequenceState, rows: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Run a target step over a chain; return the sampled tokens and the target's outputs."""
        outputs = self._launch(sequence, rows, tree=True)
        logits = outputs["logits"]
        zeros = np.zeros(rows, np.int32)
        position = self._counter.range(sequence.length, rows)
        sampling = {"temperature": zeros.astype(np.float32), "top_k": zeros, "seed": zeros}
        top_p = np.ones(rows, np.float32)
        feeds = {"logits": logits, "position": position, "top_p": top_p, **sampling}
        return self._executor.run("choose", feeds)["choice"], outputs

    def _commit_feeds(
        self, sequence: SequenceState, outputs: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The inputs of a commit that computes states over all rows, and keeps none of them."""
        feeds: dict[str, np.ndarray] = {}
        for group in groups_of(self._manifest.roles["target"]):
            feeds |= dict.fromkeys(
                (f"{group}.from_slot", f"{group}.to_slot"), np.full((1, 1), -1, np.int32)
            )
        for states in self._manifest.state_groups:
            feeds |= replayed_inputs(states, outputs)
            rows = len(next(iter(replayed_inputs(states, outputs).values())))
            holders = [sequence.pages[states.name]]
            feeds |= path_feeds(states, holders, [(0, range(rows))], stores=False)
        return feeds

    def _launch(self, sequence: SequenceState, rows: int, *, tree: bool) -> dict[str, np.ndarray]:
        length = sequence.length
        layout = RowLayout([length], [rows], [length if tree else length + rows])
        bits = chain_trees([0], np.zeros((1, rows - 1), np.int32)).ancestor_bits[0]
        vocab = self._manifest.target.vocab
        feeds = {
            "token_ids": self._random.integers(0, vocab, rows, dtype=np.int32),
            "positions": self._counter.range(length, rows),
            "row_start": layout.row_start(),
            "ancestor_bits": bits if tree else np.zeros((rows, 1), np.int32),
            "logit_rows": self._counter.range(0, rows),
        }
        for group in groups_of(self._manifest.roles["target"]):
            holder = sequence.pages[group]
            holder.append(rows)
            feeds |= launch_feeds(self._manifest, group, [holder], layout, self._counter)
        for states in self._manifest.state_groups:
            holders = [sequence.pages[states.name]]
            feeds |= path_feeds(states, holders, [(0, range(rows))], stores=not tree)
        return self._executor.run("target", feeds)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    started_s = perf_counter()
    call(*arguments)
    return perf_counter() - started_s
