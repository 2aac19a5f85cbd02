"""SpecPV for steps that the host runs: the views of sequences, and the graph inputs for them.

The decisions are in ``runtime/lossy/specpv/state.py``; this file builds and reads page tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter, cache_feeds
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.engine_dir.cache_groups import choosing_group
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Manifest, SpecPv
from specbuild.runtime.lossy.dsa.state import EVERYTHING
from specbuild.runtime.lossy.mode import HostModeRequest, Verified
from specbuild.runtime.lossy.specpv.state import (
    SequenceView,
    StepChoice,
    ViewGeometry,
    automatic_budget,
)
from specbuild.runtime.request import Request, SequenceState


@dataclass
class _StoredView:
    """A sequence's view, and the logical page of each of its entries [layers, heads, entries]."""

    view: SequenceView
    pages: np.ndarray


@dataclass(frozen=True)
class ViewLayout:
    """The cache groups that views apply to.

    The keys of group ``chooser`` select blocks, for each of its ``layers`` and KV ``heads``.
    ``places`` maps each group with views to the indices of its layers among the chooser's.
    """

    geometry: ViewGeometry
    chooser: str
    layers: int
    heads: int
    places: Mapping[str, list[int]]


def view_geometry(manifest: Manifest) -> ViewGeometry | None:
    """Return the sizes of this engine's views, or None without SpecPV."""
    if manifest.specpv is None:
        return None
    page_size = manifest.group(choosing_group(manifest.specpv)).page_size
    return ViewGeometry(manifest.specpv, page_size, deepest=manifest.limits.draft_depth + 1)


def view_layout(manifest: Manifest) -> ViewLayout | None:
    """Return the groups that this engine's views apply to, or None without SpecPV."""
    geometry = view_geometry(manifest)
    if geometry is None:
        return None
    chooser = manifest.group(choosing_group(geometry.config))
    viewed_groups = [
        g for g in manifest.cache_groups if g.window == 0 and g.name not in DRAFT_GROUPS
    ]
    places = {g.name: [chooser.layers.index(layer) for layer in g.layers] for g in viewed_groups}
    return ViewLayout(geometry, chooser.name, len(chooser.layers), chooser.kv_heads, places)


@dataclass(frozen=True)
class _Viewing(HostModeRequest):
    """How the sequences of a step take part, in their order."""

    choices: tuple[StepChoice, ...] = ()


class HostViews:
    """The views of the sequences of one loop, by sequence index."""

    def __init__(self, manifest: Manifest, counter: SlotCounter) -> None:
        layout = view_layout(manifest)
        assert layout is not None
        self._layout = layout
        self._counter = counter
        self._views: dict[int, _StoredView] = {}

    @property
    def groups(self) -> Sequence[str]:
        """The cache groups that views apply to."""
        return tuple(self._layout.places)

    def begin(self, sequence: SequenceState) -> None:
        """Add a sequence: its prompt will be exact, and no block is summarised or selected."""
        layout = self._layout
        view = new_view(layout.geometry, layout.layers, sequence)
        entries = (layout.layers, layout.heads, layout.geometry.entries)
        self._views[sequence.index] = _StoredView(view, np.zeros(entries, np.int32))

    def release(self, sequence: SequenceState) -> None:
        """Forget a finished sequence."""
        self._views.pop(sequence.index, None)

    def request_step(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> _Viewing:
        """Decide how each sequence verifies its tree."""
        pairs = zip(sequences, nodes, strict=True)
        choices = tuple(self._views[s.index].view.choose(s.length, count) for s, count in pairs)
        return _Viewing(chain_start=[c.chain_start for c in choices], choices=choices)

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        mode_request: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """Return the inputs that place the rows in their views, for each of :attr:`groups`."""
        del trial
        feeds: dict[str, np.ndarray] = {}
        for group in self.groups:
            pages = [s.pages[group] for s in sequences]
            if mode_request is None:
                feeds |= full_view_feeds(self._layout, group, pages, rows, self._counter)
            else:
                assert isinstance(mode_request, _Viewing)
                stored = [self._views[s.index] for s in sequences]
                feeds |= self._view_feeds(group, pages, rows, stored, mode_request.choices)
        return feeds

    def received(
        self, sequences: Sequence[SequenceState], mode_request: HostModeRequest, verified: Verified
    ) -> None:
        """Store the selected views, and count how many re-verified tokens agree."""
        if verified.trial:
            return
        assert isinstance(mode_request, _Viewing)
        chooser = self._layout.chooser
        tables = verified.outputs[f"{chooser}.partial_table.out"]
        for b, (s, choice) in enumerate(zip(sequences, mode_request.choices, strict=True)):
            stored = self._views[s.index]
            if choice.blocks is not None:
                pages = s.pages[chooser]
                logical = np.zeros(pages.table.max() + 1, np.int32)
                logical[pages.table[: pages.end_page]] = np.arange(pages.end_page)
                stored.pages[:] = logical[tables[:, b]]
            chain, root = s.length - choice.chain_start, verified.root_row[b]
            emitted = s.ids[choice.chain_start + 1 : s.length + 1]
            agreed = int((verified.row_sampled[root - chain : root] == emitted).sum())
            stored.view.counters.recheck(chain, agreed)
            stored.view.log_fallback(choice, s.request.id, s.length)
            stored.view.committed(choice, s.length, s.length + verified.accepted[b] + 1)

    def reverifies_from(self, sequence: SequenceState) -> int:
        """Tokens of partial steps are not exact in every layer."""
        return min(sequence.length, self._views[sequence.index].view.global_verified_len)

    def _view_feeds(
        self,
        group: str,
        pages: Sequence[SequencePages],
        rows: RowLayout,
        stored: Sequence[_StoredView],
        choices: Sequence[StepChoice],
    ) -> dict[str, np.ndarray]:
        places = self._layout.places[group]
        views = [
            _view_pages(h, p)[places] if c.partial else None
            for h, p, c in zip(stored, pages, choices, strict=True)
        ]
        hidden = [
            h.view.hidden_tokens if c.partial else 0 for h, c in zip(stored, choices, strict=True)
        ]
        feeds = _table_feeds(self._layout, group, pages, views) | _row_feeds(
            group, pages, rows, hidden, self._counter
        )
        if group != self._layout.chooser:
            return feeds
        nodes = [f + n - t for f, n, t in zip(rows.first, rows.count, rows.tree_start, strict=True)]
        blocks = [-1 if c.blocks is None else c.blocks for c in choices]
        return feeds | {
            f"{group}.logical_pages": _logical_pages(pages),
            f"{group}.first_block": _ints([h.view.summarised_blocks for h in stored]),
            f"{group}.blocks": _ints(blocks),
            f"{group}.budget": _ints([h.view.budget for h in stored]),
            f"{group}.tree_count": _ints(nodes),
            f"{group}.partial_table": _unused_tables(self._layout, len(stored)),
        }


def new_view(geometry: ViewGeometry, layers: int, sequence: SequenceState) -> SequenceView:
    """Return the view of a new sequence, and attach its counters to the sequence."""
    budget, reason = requested_budget(geometry.config, sequence.request)
    view = SequenceView(geometry, layers=layers, budget=budget)
    view.prefilled(len(sequence.request.prompt_ids))
    view.counters.retrieval_reason = reason
    sequence.counters.specpv = view.counters
    return view


def requested_budget(config: SpecPv, request: Request) -> tuple[int, str | None]:
    """Return the number of blocks that a request may retrieve, and the reason if it is ``auto``."""
    requested = request.params.specpv_retrieval_blocks
    if requested is None:
        return config.n_retrieval_blocks, None
    if requested == "auto":
        return automatic_budget(config, len(request.prompt_ids), request.token_budget)
    return requested, None


def launch_feeds(
    manifest: Manifest,
    group: str,
    pages: Sequence[SequencePages],
    rows: RowLayout,
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """Return one group's inputs of a launch with full views, with or without SpecPV.

    With DSA, the rows attend to everything.
    """
    layout = view_layout(manifest)
    if layout is None or group not in layout.places:
        feeds = cache_feeds(group, pages, rows, counter)
    else:
        feeds = full_view_feeds(layout, group, pages, rows, counter)
    if group == INDEXER_GROUP:
        feeds[f"{group}.top_k"] = np.full(len(pages), EVERYTHING, np.int32)
    return feeds


def table_shape(manifest: Manifest, geometry: ViewGeometry) -> tuple[int, int, int]:
    """The number of layers, KV heads and entries of a partial table."""
    group = manifest.group(choosing_group(geometry.config))
    return len(group.layers), group.kv_heads, geometry.entries


def full_view_feeds(
    layout: ViewLayout,
    group: str,
    pages: Sequence[SequencePages],
    rows: RowLayout,
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """Return a group's inputs of a launch that has full views and selects no blocks."""
    feeds = _table_feeds(layout, group, pages, [None] * len(pages))
    feeds |= _row_feeds(group, pages, rows, [0] * len(pages), counter)
    if group != layout.chooser:
        return feeds
    zeros = np.zeros(len(pages), np.int32)
    return feeds | {
        f"{group}.logical_pages": _logical_pages(pages),
        f"{group}.first_block": zeros,
        f"{group}.blocks": zeros - 1,
        f"{group}.budget": zeros,
        f"{group}.tree_count": zeros,
        f"{group}.partial_table": _unused_tables(layout, len(pages)),
    }


def _view_pages(stored: _StoredView, pages: SequencePages) -> np.ndarray:
    """Return the logical pages of a view, including the pages after its last block."""
    view, geometry = stored.view, stored.view.geometry
    first = view.tail_start // geometry.page_size
    place = geometry.sink_pages + view.retrieved_pages
    end = place + pages.end_page - first
    stored.pages[:, :, place:end] = np.arange(first, pages.end_page)
    return stored.pages[:, :, :end]


def _table_feeds(
    layout: ViewLayout,
    group: str,
    pages: Sequence[SequencePages],
    views: Sequence[np.ndarray | None],
) -> dict[str, np.ndarray]:
    """Return page tables [layers, B, heads, P] of views: logical pages, or None for a full view.

    Also returns the position of each page of the first head, [layers, B, P].
    """
    every = [p.end_page if s is None else s.shape[2] for p, s in zip(pages, views, strict=True)]
    shape = (len(layout.places[group]), len(pages), layout.heads, max(every))
    table, logical = np.zeros((2, *shape), np.int32)
    for b, (holder, view, count) in enumerate(zip(pages, views, every, strict=True)):
        logical[:, b, :, :count] = np.arange(count) if view is None else view
        table[:, b, :, :count] = holder.table[logical[:, b, :, :count]]
    return {
        f"{group}.page_table": table,
        f"{group}.page_position": logical[:, :, 0] * np.int32(layout.geometry.page_size),
    }


def _row_feeds(
    group: str,
    pages: Sequence[SequencePages],
    rows: RowLayout,
    hidden: Sequence[int],
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """Return the inputs that place rows in their views and in the pool."""
    first = [f - h for f, h in zip(rows.first, hidden, strict=True)]
    start = [t - h for t, h in zip(rows.tree_start, hidden, strict=True)]
    writes = [p.slots[f : f + n] for p, f, n in zip(pages, rows.first, rows.count, strict=True)]
    return {
        f"{group}.row_slot": counter.ranges(first, rows.count),
        f"{group}.tree_start": _ints(start),
        f"{group}.write_slot": np.concatenate(writes),
    }


def _logical_pages(pages: Sequence[SequencePages]) -> np.ndarray:
    """Return the page of each logical page [B, P]."""
    logical = np.zeros((len(pages), max(p.end_page for p in pages)), np.int32)
    for row, holder in zip(logical, pages, strict=True):
        row[: holder.end_page] = holder.table[: holder.end_page]
    return logical


def _unused_tables(layout: ViewLayout, batch: int) -> np.ndarray:
    """Return an unused input: the host keeps the tables itself."""
    return np.zeros((layout.layers, batch, layout.heads, layout.geometry.entries), np.int32)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
