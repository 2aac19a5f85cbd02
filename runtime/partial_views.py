"""The host's half of SpecPV: each sequence's views, and the graph inputs that place them.

``runtime/specpv.py`` decides; here page tables are put together and taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.dsa import EVERYTHING
from specbuild.runtime.kv_pool import FULL_GROUP, SequencePages
from specbuild.runtime.launch import RowPlan, SlotCounter, cache_feeds
from specbuild.runtime.manifest import INDEXER_GROUP, Manifest, SpecPv
from specbuild.runtime.request import Request, SequenceState
from specbuild.runtime.specpv import (
    SequenceView,
    StepChoice,
    ViewGeometry,
    automatic_budget,
)

PARTIAL_TABLE = f"{FULL_GROUP}.partial_table"


@dataclass
class _Held:
    """A sequence's view and its page table [layers, kv_heads, entries]."""

    view: SequenceView
    table: np.ndarray


def view_geometry(manifest: Manifest) -> ViewGeometry | None:
    """The sizes of this engine's views, None without SpecPV."""
    if manifest.specpv is None:
        return None
    page_size = manifest.group(FULL_GROUP).page_size
    return ViewGeometry(manifest.specpv, page_size, deepest=manifest.limits.draft_depth + 1)


class PartialViews:
    """Views of the sequences of one generation, by their index."""

    def __init__(self, manifest: Manifest, counter: SlotCounter) -> None:
        geometry = view_geometry(manifest)
        assert geometry is not None
        self._geometry = geometry
        self._counter = counter
        self._shape = table_shape(manifest, geometry)
        self._indexed = _indexed_places(manifest)
        self._held: dict[int, _Held] = {}

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def prefilled(self, sequence: SequenceState) -> None:
        """All of its committed tokens came by prefill."""
        self._of(sequence).view.prefilled(sequence.length)

    def choose(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> list[StepChoice]:
        """How each sequence verifies its tree of this many nodes below the root."""
        return [
            self._of(s).view.choose(s.length, count)
            for s, count in zip(sequences, nodes, strict=True)
        ]

    def committed(self, sequence: SequenceState, choice: StepChoice, before: int) -> int:
        """A step took a sequence from ``before`` tokens to its length; the tokens now exact."""
        view = self._of(sequence).view
        view.committed(choice, before, sequence.length)
        return view.global_verified_len

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        plan: RowPlan,
        choices: Sequence[StepChoice] | None,
    ) -> dict[str, np.ndarray]:
        """The inputs of the full-attention group; ``choices`` None for a prompt's chunks."""
        if choices is None:
            return whole_view_feeds(
                [s.pages[FULL_GROUP] for s in sequences], plan, self._counter, self._shape
            )
        held = [self._of(s) for s in sequences]
        pages = [s.pages[FULL_GROUP] for s in sequences]
        blocks = [c.blocks for c in choices]
        rows = [f + n - t for f, n, t in zip(plan.first, plan.count, plan.tree_start, strict=True)]
        hidden = [
            h.view.hidden_tokens if c.partial else 0 for h, c in zip(held, choices, strict=True)
        ]
        views = [
            _partial_table(h, p) if c.partial else p.table[None, None, : p.end_page]
            for h, p, c in zip(held, pages, choices, strict=True)
        ]
        feeds = _placed(pages, plan, hidden, self._counter, FULL_GROUP)
        feeds |= {
            f"{FULL_GROUP}.logical_pages": _logical_pages(pages),
            f"{FULL_GROUP}.page_table": _stacked(views, self._shape),
            f"{FULL_GROUP}.first_block": _ints([h.view.summarised_blocks for h in held]),
            f"{FULL_GROUP}.blocks": _ints([-1 if n is None else n for n in blocks]),
            f"{FULL_GROUP}.budget": _ints([h.view.budget for h in held]),
            f"{FULL_GROUP}.tree_count": _ints(rows),
            PARTIAL_TABLE: _no_tables(len(sequences), self._shape),
        }
        return feeds

    def index_feeds(
        self,
        sequences: Sequence[SequenceState],
        plan: RowPlan,
        choices: Sequence[StepChoice] | None,
    ) -> dict[str, np.ndarray]:
        """The inputs of the indexers' group, which sees what the full-attention group sees.

        To be asked for after :meth:`feeds`, which brings partial tables up to date.
        """
        own = [s.pages[INDEXER_GROUP] for s in sequences]
        partial = [choices is not None and choices[b].partial for b in range(len(sequences))]
        held = [self._of(s) for s in sequences]
        hidden = [h.view.hidden_tokens if p else 0 for h, p in zip(held, partial, strict=True)]
        views = [
            _translated(_partial_table(h, s.pages[FULL_GROUP])[self._indexed], s)
            if p
            else s.pages[INDEXER_GROUP].table[None, None, : s.pages[INDEXER_GROUP].end_page]
            for s, h, p in zip(sequences, held, partial, strict=True)
        ]
        placed = _placed(own, plan, hidden, self._counter, INDEXER_GROUP)
        _, kv_heads, entries = self._shape
        shape = (len(self._indexed), kv_heads, entries)
        return placed | {f"{INDEXER_GROUP}.page_table": _stacked(views, shape)}

    def take(
        self,
        sequences: Sequence[SequenceState],
        choices: Sequence[StepChoice],
        outputs: Mapping[str, np.ndarray],
    ) -> None:
        """Keeps the views that a launch chose."""
        tables = outputs[f"{PARTIAL_TABLE}.out"]
        for b, (sequence, choice) in enumerate(zip(sequences, choices, strict=True)):
            if choice.blocks is not None:
                self._of(sequence).table[:] = tables[:, b]

    def recheck(
        self,
        sequences: Sequence[SequenceState],
        choices: Sequence[StepChoice],
        chosen: np.ndarray,
        row_start: np.ndarray,
    ) -> None:
        """Counts how often tokens fed again [T] are what the target chooses over everything."""
        for sequence, choice, first in zip(sequences, choices, row_start, strict=False):
            count = sequence.length - choice.chain_start
            if count:
                emitted = sequence.ids[choice.chain_start + 1 : sequence.length + 1]
                agreed = int((chosen[first : first + count] == emitted).sum())
                self._of(sequence).view.tally.recheck(count, agreed)

    def _of(self, sequence: SequenceState) -> _Held:
        held = self._held.get(sequence.index)
        if held is None:
            budget = requested_budget(self._geometry.config, sequence.request)
            view = SequenceView(self._geometry, layers=self._shape[0], budget=budget)
            held = _Held(view, np.zeros(self._shape, np.int32))
            sequence.tally.specpv = view.tally
            self._held[sequence.index] = held
        return held


def requested_budget(config: SpecPv, request: Request) -> int:
    """The blocks that a request may retrieve."""
    asked = request.params.specpv_retrieval_blocks
    if asked is None:
        return config.n_retrieval_blocks
    if asked == "auto":
        return automatic_budget(config, len(request.prompt_ids), request.token_budget)[0]
    return asked


def launch_feeds(
    manifest: Manifest,
    group: str,
    pages: Sequence[SequencePages],
    plan: RowPlan,
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """One group's inputs of a launch that sees all of its sequences, with SpecPV or without.

    Its rows attend to all that they see.
    """
    geometry = view_geometry(manifest)
    if group == INDEXER_GROUP:
        budget = {f"{INDEXER_GROUP}.budget": np.full(len(pages), EVERYTHING, np.int32)}
        if geometry is None:
            return cache_feeds(group, pages, plan, counter) | budget
        _, kv_heads, entries = table_shape(manifest, geometry)
        shape = (len(_indexed_places(manifest)), kv_heads, entries)
        whole = [p.table[None, None, : p.end_page] for p in pages]
        placed = _placed(pages, plan, [0] * len(pages), counter, group)
        return placed | budget | {f"{group}.page_table": _stacked(whole, shape)}
    if geometry is None or group != FULL_GROUP:
        return cache_feeds(group, pages, plan, counter)
    return whole_view_feeds(pages, plan, counter, table_shape(manifest, geometry))


def _indexed_places(manifest: Manifest) -> list[int]:
    """Where the layers that have an indexer stand among the full-attention ones."""
    layers = manifest.group(FULL_GROUP).layers
    indexer = manifest.target.indexer
    return [] if indexer is None else [layers.index(layer) for layer in indexer.layers]


def _translated(table: np.ndarray, sequence: SequenceState) -> np.ndarray:
    """A table of a sequence's full-attention pages as one of its indexers' pages."""
    full, own = sequence.pages[FULL_GROUP], sequence.pages[INDEXER_GROUP]
    pages = np.zeros(full.table.max() + 1, np.int32)
    pages[full.table[: full.end_page]] = own.table[: own.end_page]
    return pages[table]


def table_shape(manifest: Manifest, geometry: ViewGeometry) -> tuple[int, int, int]:
    """Layers, KV heads and entries of a partial table."""
    group = manifest.group(FULL_GROUP)
    return len(group.layers), group.kv_heads, geometry.entries


def whole_view_feeds(
    pages: Sequence[SequencePages],
    plan: RowPlan,
    counter: SlotCounter,
    shape: tuple[int, int, int],
) -> dict[str, np.ndarray]:
    """The full-attention group's inputs of a launch that sees everything and chooses nothing.

    ``shape`` is (layers, kv_heads, entries) of a partial table.
    """
    feeds = _placed(pages, plan, [0] * len(pages), counter, FULL_GROUP)
    zeros = np.zeros(len(pages), np.int32)
    whole = [p.table[None, None, : p.end_page] for p in pages]
    return feeds | {
        f"{FULL_GROUP}.logical_pages": _logical_pages(pages),
        f"{FULL_GROUP}.page_table": _stacked(whole, shape),
        f"{FULL_GROUP}.first_block": zeros,
        f"{FULL_GROUP}.blocks": zeros - 1,
        f"{FULL_GROUP}.budget": zeros,
        f"{FULL_GROUP}.tree_count": zeros,
        PARTIAL_TABLE: _no_tables(len(pages), shape),
    }


def _partial_table(held: _Held, pages: SequencePages) -> np.ndarray:
    """The chosen table with the pages that the sequence has now behind the last block."""
    view, geometry = held.view, held.view.geometry
    first = view.tail_start // geometry.page_size
    place = geometry.sink_pages + view.retrieved_pages
    end = place + pages.end_page - first
    held.table[:, :, place:end] = pages.table[first : pages.end_page]
    return held.table[:, :, :end]


def _placed(
    pages: Sequence[SequencePages],
    plan: RowPlan,
    hidden: Sequence[int],
    counter: SlotCounter,
    group: str,
) -> dict[str, np.ndarray]:
    """Where the rows stand in their views and in the pool."""
    first = [f - h for f, h in zip(plan.first, hidden, strict=True)]
    start = [t - h for t, h in zip(plan.tree_start, hidden, strict=True)]
    writes = [p.slots[f : f + n] for p, f, n in zip(pages, plan.first, plan.count, strict=True)]
    return {
        f"{group}.row_slot": counter.ranges(first, plan.count),
        f"{group}.tree_start": _ints(start),
        f"{group}.write_slot": np.concatenate(writes),
    }


def _logical_pages(pages: Sequence[SequencePages]) -> np.ndarray:
    """The pages of every position [B, P]."""
    logical = np.zeros((len(pages), max(p.end_page for p in pages)), np.int32)
    for row, holder in zip(logical, pages, strict=True):
        row[: holder.end_page] = holder.table[: holder.end_page]
    return logical


def _stacked(views: Sequence[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """Tables [layers or 1, kv_heads or 1, n] as one [layers, B, kv_heads, P]."""
    layers, kv_heads, _ = shape
    widest = max(view.shape[2] for view in views)
    table = np.zeros((layers, len(views), kv_heads, widest), np.int32)
    for b, view in enumerate(views):
        table[:, b, :, : view.shape[2]] = view
    return table


def _no_tables(batch: int, shape: tuple[int, int, int]) -> np.ndarray:
    """What no sequence reads: the host keeps the tables itself."""
    layers, kv_heads, entries = shape
    return np.zeros((layers, batch, kv_heads, entries), np.int32)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
