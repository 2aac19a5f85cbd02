"""What a step costs on this machine: measured on first use, kept in a cache directory."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowPlan, SlotCounter, groups_of
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.eagle3 import Eagle3Drafter
from specbuild.runtime.draft.tree import chain_trees
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.manifest_check import DECODING_ROLES, DRAFTING_ROLES
from specbuild.runtime.engine_dir.regular_file import read_regular
from specbuild.runtime.engine_dir.strict_json import from_json, parsed, to_json
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.specpv.host_tables import launch_feeds
from specbuild.runtime.request import GenerateParams, Request, SequenceState
from specbuild.runtime.statistics import RunCounters

MEASURING_BUDGET_S = 0.2
MAX_MEASURED_ROWS = 8
MEASURED_CONTEXT = 128
_ROUNDS = 6
_MEASURED_ROWS = (1, 2, 4, 6, 8)
_LEAST_S = 1e-6
# A table has a dozen numbers.
_MOST_BYTES = 64 << 10
# A table of another method of measuring is not this one's.
_METHOD = "whole steps"


class CannotMeasureError(SpecbuildError):
    """There is no space to measure in; the message is the reason, as the end of a sentence."""


def load_or_measure(path: Path | None, measure: Callable[[], CostTable]) -> tuple[CostTable, str]:
    """The table kept at ``path``, else a fresh one that is then kept; and where it came from.

    A file that does not hold a table is measured anew. A directory that cannot be written
    costs the next start the same measurement, nothing else.
    """
    kept = None if path is None else _read(path)
    if kept is not None:
        return kept, "kept from an earlier run"
    table = measure()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(to_json(table)))
        except OSError:
            return table, f"measured now; {path.parent} cannot be written"
    return table, "measured now"


def cache_path(directory: Path | None, *key: object) -> Path | None:
    """The file for a manifest, machine, thread count and library version."""
    if directory is None:
        return None
    digest = hashlib.sha256("\n".join(map(str, (_METHOD, *key))).encode()).hexdigest()
    return directory / f"cost-{digest[:32]}.json"


def _write(path: Path, text: str) -> None:
    """Puts a file in place at once: processes that measure at the same time keep apart."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _read(path: Path) -> CostTable | None:
    try:
        data = read_regular(path.parent, path.name, most_bytes=_MOST_BYTES)
        table = from_json(CostTable, parsed(data), path.name)
    except (OSError, ValueError, SpecbuildError):
        return None
    rows, times = table.target_rows, (*table.target_s, *table.draft_s)
    sound = (
        len(rows) == len(table.target_s) > 0
        and len(table.draft_s) > 0
        and rows == tuple(sorted(set(rows)))
        and rows[0] >= 1
        and all(0 < t < 3600 for t in times)
        and 0 <= table.row_s < 3600
    )
    return table if sound else None


class CostMeasurement:
    """Times target steps and draft chains on a scratch sequence of random tokens."""

    def __init__(self, executor: Executor, manifest: Manifest, kv: KvPools) -> None:
        self._executor = executor
        self._manifest = manifest
        self._kv = kv
        limits = manifest.limits
        self._context = max(2, min(MEASURED_CONTEXT, limits.max_seq_len // 2))
        # Every draft extends the draft's cache by one token: two, and one of each depth a round.
        capacity = limits.max_seq_len - self._context - 2
        deepest = min(limits.draft_depth, limits.draft_tokens, MAX_MEASURED_ROWS - 1)
        self._depth = min(deepest, capacity - 2)
        self._drafts = min(_ROUNDS * self._depth + 2, capacity)
        self._counter = SlotCounter(limits.max_seq_len + limits.draft_tokens + limits.max_rows)
        self._random = np.random.default_rng(0)

    def run(self) -> CostTable:
        """The table; stops early where the time for measuring is used up.

        Raises CannotMeasureError where the limits, or the pages that are free, leave no space.
        """
        if self._depth < 1:
            longest = self._manifest.limits.max_seq_len
            raise CannotMeasureError(
                f"a max_seq_len of {longest} leaves no space to measure drafts"
            )
        self._executor.prepare((*DECODING_ROLES, *DRAFTING_ROLES))
        deadline_s = perf_counter() + MEASURING_BUDGET_S
        rows = sorted({n for n in _MEASURED_ROWS if n <= self._depth} | {self._depth + 1})
        target_s: list[list[float]] = [[] for _ in rows]
        step_s: list[list[float]] = [[] for _ in range(self._depth)]
        sequence = self._scratch()
        drafter = Eagle3Drafter(self._executor, self._manifest, self._counter)
        try:
            # The first draft pays for allocations, the second takes up as many rows without.
            half, level = -(-self._context // 2), DraftShape(1, 1, 1)
            self._fill(sequence, drafter, half)
            drafter.propose([sequence], level)
            aux_hidden = self._fill(sequence, drafter, self._context)
            many_s = _timed(drafter.propose, [sequence], level)
            drafter.observe(sequence, aux_hidden)
            one_s = _timed(drafter.propose, [sequence], level)
            drafter.observe(sequence, aux_hidden)
            for round_number in range((self._drafts - 2) // self._depth):
                for i, n in enumerate(rows):
                    self._step(sequence, n)
                    target_s[i].append(_timed(self._step, sequence, n))
                for depth in range(1, self._depth + 1):
                    step_s[depth - 1].append(_timed(self._drafted_step, sequence, drafter, depth))
                    drafter.observe(sequence, aux_hidden)
                if perf_counter() > deadline_s and round_number > 0:
                    break
        finally:
            self._kv.release(sequence.pages, sequence.pages_reserved)
        # What disturbs a step only makes it longer: the shortest is the machine's own.
        table = CostTable(tuple(rows), tuple(map(min, target_s)), ())
        added = [min(times) - table.step_s(d) for d, times in enumerate(step_s, start=2)]
        draft_s = tuple(max(time_s, _LEAST_S) for time_s in added)
        row_s = max(many_s - one_s, 0.0) / (self._context - half)
        return replace(table, draft_s=draft_s, row_s=row_s)

    def _scratch(self) -> SequenceState:
        vocab, tokens = self._manifest.target.vocab, self._context + self._drafts + 2
        wanted = self._kv.pages_wanted(tokens)
        if not self._kv.can_admit(wanted):
            raise CannotMeasureError("other generations hold the pages to measure drafts in")
        return SequenceState(
            request=Request("cost", (0,), GenerateParams(), 1),
            index=-1,
            ids=self._random.integers(0, vocab, tokens, dtype=np.int32),
            pages=self._kv.admit(wanted),
            pages_reserved=wanted,
            counters=RunCounters(0),
            text=None,
            known=self._context + self._drafts + 2,
        )

    def _fill(self, sequence: SequenceState, drafter: Eagle3Drafter, length: int) -> np.ndarray:
        """Enters tokens in launches of the allowed size; the last row's aux hidden states."""
        while sequence.length < length:
            count = min(length - sequence.length, self._manifest.limits.max_rows)
            aux_hidden = self._launch(sequence, count, tree=False)["captured"]
            sequence.length += count
            for group in groups_of(self._manifest.roles["target"]):
                sequence.pages[group].commit(sequence.length)
            drafter.observe(sequence, aux_hidden)
        return aux_hidden[-1:].copy()

    def _drafted_step(self, sequence: SequenceState, drafter: Eagle3Drafter, depth: int) -> None:
        trees = drafter.propose([sequence], DraftShape(1, depth, depth))
        sampled = self._step(sequence, depth + 1)
        self._executor.run(
            "accept",
            {
                "tokens": trees.tokens,
                "parents": trees.parents,
                "ancestor_bits": trees.ancestor_bits,
                "count": trees.count,
                "choice": sampled[None],
            },
        )

    def _step(self, sequence: SequenceState, rows: int) -> np.ndarray:
        """A target step over a chain; the token sampled at each row, [rows]."""
        logits = self._launch(sequence, rows, tree=True)["logits"]
        zeros = np.zeros(rows, np.int32)
        position = self._counter.range(sequence.length, rows)
        sampling = {"temperature": zeros.astype(np.float32), "top_k": zeros, "seed": zeros}
        top_p = np.ones(rows, np.float32)
        feeds = {"logits": logits, "position": position, "top_p": top_p, **sampling}
        return self._executor.run("choose", feeds)["choice"]

    def _launch(self, sequence: SequenceState, rows: int, *, tree: bool) -> dict[str, np.ndarray]:
        length = sequence.length
        plan = RowPlan([length], [rows], [length if tree else length + rows])
        bits = chain_trees([0], np.zeros((1, rows - 1), np.int32)).ancestor_bits[0]
        vocab = self._manifest.target.vocab
        feeds = {
            "token_ids": self._random.integers(0, vocab, rows, dtype=np.int32),
            "positions": self._counter.range(length, rows),
            "row_start": plan.row_start(),
            "ancestor_bits": bits if tree else np.zeros((rows, 1), np.int32),
            "logit_rows": self._counter.range(0, rows),
        }
        for group in groups_of(self._manifest.roles["target"]):
            holder = sequence.pages[group]
            holder.append(rows)
            feeds |= launch_feeds(self._manifest, group, [holder], plan, self._counter)
        return self._executor.run("target", feeds)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    started_s = perf_counter()
    call(*arguments)
    return perf_counter() - started_s
