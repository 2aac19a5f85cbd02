"""The host's half of SpecPV: each sequence's views, and the graph inputs that place them.

``runtime/lossy/specpv/state.py`` decides; here page tables are put together and taken back.
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
from specbuild.runtime.lossy.mode import HostModeRequest
from specbuild.runtime.lossy.specpv.state import (
    SequenceView,
    StepChoice,
    ViewGeometry,
    automatic_budget,
)
from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import Request, SequenceState


@dataclass
class _Held:
    """A sequence's view, and the logical page of each of its entries [layers, heads, entries]."""

    view: SequenceView
    pages: np.ndarray


@dataclass(frozen=True)
class ViewLayout:
    """Which cache groups views cut down, and how.

    By the keys of group ``chooser`` blocks are chosen for each of its ``layers`` and KV ``heads``.
    ``places`` has the groups that see a view, and where their layers stand among the chooser's.
    """

    geometry: ViewGeometry
    chooser: str
    layers: int
    heads: int
    places: Mapping[str, list[int]]


def view_geometry(manifest: Manifest) -> ViewGeometry | None:
    """The sizes of this engine's views, None without SpecPV."""
    if manifest.specpv is None:
        return None
    page_size = manifest.group(choosing_group(manifest.specpv)).page_size
    return ViewGeometry(manifest.specpv, page_size, deepest=manifest.limits.draft_depth + 1)


def view_layout(manifest: Manifest) -> ViewLayout | None:
    """Which groups see this engine's views, None without SpecPV."""
    geometry = view_geometry(manifest)
    if geometry is None:
        return None
    chooser = manifest.group(choosing_group(geometry.config))
    seen = [g for g in manifest.cache_groups if g.window == 0 and g.name not in DRAFT_GROUPS]
    places = {g.name: [chooser.layers.index(layer) for layer in g.layers] for g in seen}
    return ViewLayout(geometry, chooser.name, len(chooser.layers), chooser.kv_heads, places)


@dataclass(frozen=True)
class _Viewing(HostModeRequest):
    """How the sequences of a step take part, in their order."""

    choices: tuple[StepChoice, ...] = ()


class HostViews:
    """Views of the sequences of one loop, by their index."""

    def __init__(self, manifest: Manifest, counter: SlotCounter) -> None:
        layout = view_layout(manifest)
        assert layout is not None
        self._layout = layout
        self._counter = counter
        self._held: dict[int, _Held] = {}

    @property
    def groups(self) -> Sequence[str]:
        """The cache groups that see views."""
        return tuple(self._layout.places)

    def begin(self, sequence: SequenceState) -> None:
        """The prompt will be exact, nothing summarised or chosen."""
        layout = self._layout
        view = begun_view(layout.geometry, layout.layers, sequence)
        entries = (layout.layers, layout.heads, layout.geometry.entries)
        self._held[sequence.index] = _Held(view, np.zeros(entries, np.int32))

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def plan(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> _Viewing:
        """Settles how each sequence verifies its tree."""
        pairs = zip(sequences, nodes, strict=True)
        choices = tuple(self._held[s.index].view.choose(s.length, count) for s, count in pairs)
        return _Viewing(chain_start=[c.chain_start for c in choices], choices=choices)

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        plan: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """Where the rows stand in their views, for every one of :attr:`groups`."""
        del trial
        feeds: dict[str, np.ndarray] = {}
        for group in self.groups:
            pages = [s.pages[group] for s in sequences]
            if plan is None:
                feeds |= whole_view_feeds(self._layout, group, pages, rows, self._counter)
            else:
                assert isinstance(plan, _Viewing)
                held = [self._held[s.index] for s in sequences]
                feeds |= self._view_feeds(group, pages, rows, held, plan.choices)
        return feeds

    def received(
        self, sequences: Sequence[SequenceState], plan: HostModeRequest, verified: Verified
    ) -> None:
        """Keeps the views that were chosen, and counts how often re-verified tokens agree."""
        if verified.trial:
            return
        assert isinstance(plan, _Viewing)
        chooser = self._layout.chooser
        tables = verified.outputs[f"{chooser}.partial_table.out"]
        for b, (s, choice) in enumerate(zip(sequences, plan.choices, strict=True)):
            held = self._held[s.index]
            if choice.blocks is not None:
                pages = s.pages[chooser]
                logical = np.zeros(pages.table.max() + 1, np.int32)
                logical[pages.table[: pages.end_page]] = np.arange(pages.end_page)
                held.pages[:] = logical[tables[:, b]]
            chain, root = s.length - choice.chain_start, verified.root_row[b]
            emitted = s.ids[choice.chain_start + 1 : s.length + 1]
            agreed = int((verified.row_sampled[root - chain : root] == emitted).sum())
            held.view.counters.recheck(chain, agreed)
            held.view.log_fallback(choice, s.request.id, s.length)
            held.view.committed(choice, s.length, s.length + verified.accepted[b] + 1)

    def reverifies_from(self, sequence: SequenceState) -> int:
        """What partial steps emitted is not exact in every layer."""
        return min(sequence.length, self._held[sequence.index].view.global_verified_len)

    def _view_feeds(
        self,
        group: str,
        pages: Sequence[SequencePages],
        rows: RowLayout,
        held: Sequence[_Held],
        choices: Sequence[StepChoice],
    ) -> dict[str, np.ndarray]:
        places = self._layout.places[group]
        shown = [
            _shown_pages(h, p)[places] if c.partial else None
            for h, p, c in zip(held, pages, choices, strict=True)
        ]
        hidden = [
            h.view.hidden_tokens if c.partial else 0 for h, c in zip(held, choices, strict=True)
        ]
        feeds = _viewed(self._layout, group, pages, shown) | _placed(
            group, pages, rows, hidden, self._counter
        )
        if group != self._layout.chooser:
            return feeds
        nodes = [f + n - t for f, n, t in zip(rows.first, rows.count, rows.tree_start, strict=True)]
        blocks = [-1 if c.blocks is None else c.blocks for c in choices]
        return feeds | {
            f"{group}.logical_pages": _logical_pages(pages),
            f"{group}.first_block": _ints([h.view.summarised_blocks for h in held]),
            f"{group}.blocks": _ints(blocks),
            f"{group}.budget": _ints([h.view.budget for h in held]),
            f"{group}.tree_count": _ints(nodes),
            f"{group}.partial_table": _no_tables(self._layout, len(held)),
        }


def begun_view(geometry: ViewGeometry, layers: int, sequence: SequenceState) -> SequenceView:
    """The view of a sequence that comes, which counts for its statistics."""
    budget, reason = requested_budget(geometry.config, sequence.request)
    view = SequenceView(geometry, layers=layers, budget=budget)
    view.prefilled(len(sequence.request.prompt_ids))
    view.counters.retrieval_reason = reason
    sequence.counters.specpv = view.counters
    return view


def requested_budget(config: SpecPv, request: Request) -> tuple[int, str | None]:
    """The blocks that a request may retrieve, and why where it was left to the rule."""
    asked = request.params.specpv_retrieval_blocks
    if asked is None:
        return config.n_retrieval_blocks, None
    if asked == "auto":
        return automatic_budget(config, len(request.prompt_ids), request.token_budget)
    return asked, None


def launch_feeds(
    manifest: Manifest,
    group: str,
    pages: Sequence[SequencePages],
    plan: RowLayout,
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """One group's inputs of a launch that sees all of its sequences, with SpecPV or without.

    Its rows attend to all that they see.
    """
    layout = view_layout(manifest)
    if layout is None or group not in layout.places:
        feeds = cache_feeds(group, pages, plan, counter)
    else:
        feeds = whole_view_feeds(layout, group, pages, plan, counter)
    if group == INDEXER_GROUP:
        feeds[f"{group}.top_k"] = np.full(len(pages), EVERYTHING, np.int32)
    return feeds


def table_shape(manifest: Manifest, geometry: ViewGeometry) -> tuple[int, int, int]:
    """Layers, KV heads and entries of a partial table."""
    group = manifest.group(choosing_group(geometry.config))
    return len(group.layers), group.kv_heads, geometry.entries


def whole_view_feeds(
    layout: ViewLayout,
    group: str,
    pages: Sequence[SequencePages],
    plan: RowLayout,
    counter: SlotCounter,
) -> dict[str, np.ndarray]:
    """A group's inputs of a launch that sees everything and chooses no blocks."""
    feeds = _viewed(layout, group, pages, [None] * len(pages))
    feeds |= _placed(group, pages, plan, [0] * len(pages), counter)
    if group != layout.chooser:
        return feeds
    zeros = np.zeros(len(pages), np.int32)
    return feeds | {
        f"{group}.logical_pages": _logical_pages(pages),
        f"{group}.first_block": zeros,
        f"{group}.blocks": zeros - 1,
        f"{group}.budget": zeros,
        f"{group}.tree_count": zeros,
        f"{group}.partial_table": _no_tables(layout, len(pages)),
    }


def _shown_pages(held: _Held, pages: SequencePages) -> np.ndarray:
    """The logical pages of a view, with those that the sequence has behind the last block."""
    view, geometry = held.view, held.view.geometry
    first = view.tail_start // geometry.page_size
    place = geometry.sink_pages + view.retrieved_pages
    end = place + pages.end_page - first
    held.pages[:, :, place:end] = np.arange(first, pages.end_page)
    return held.pages[:, :, :end]


def _viewed(
    layout: ViewLayout,
    group: str,
    pages: Sequence[SequencePages],
    shown: Sequence[np.ndarray | None],
) -> dict[str, np.ndarray]:
    """Page tables [layers, B, heads, P] of what is shown: logical pages, or None for all.

    Beside them the position of each page of the first head's, [layers, B, P].
    """
    every = [p.end_page if s is None else s.shape[2] for p, s in zip(pages, shown, strict=True)]
    shape = (len(layout.places[group]), len(pages), layout.heads, max(every))
    table, logical = np.zeros((2, *shape), np.int32)
    for b, (holder, view, count) in enumerate(zip(pages, shown, every, strict=True)):
        logical[:, b, :, :count] = np.arange(count) if view is None else view
        table[:, b, :, :count] = holder.table[logical[:, b, :, :count]]
    return {
        f"{group}.page_table": table,
        f"{group}.page_position": logical[:, :, 0] * np.int32(layout.geometry.page_size),
    }


def _placed(
    group: str,
    pages: Sequence[SequencePages],
    plan: RowLayout,
    hidden: Sequence[int],
    counter: SlotCounter,
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


def _no_tables(layout: ViewLayout, batch: int) -> np.ndarray:
    """What no sequence reads: the host keeps the tables itself."""
    return np.zeros((layout.layers, batch, layout.heads, layout.geometry.entries), np.int32)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
