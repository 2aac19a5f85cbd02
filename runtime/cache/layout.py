"""The layout and size of cache groups in device memory, computed before allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from specbuild.runtime.engine_dir.cache_groups import slots_per_sequence
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import FP8_DTYPE, INDEXER_GROUP, CacheGroup, Limits
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.engine_dir.ranks import groups_of_rank
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError

KV_DTYPE = "bfloat16"
MIN_PAGE_SIZE = 16
# An mma instruction sums this many values, so latent widths are multiples of it.
_LATENT_STEP = 16


@dataclass(frozen=True)
class Pool:
    """One pool of a layer: its byte offset in the group's buffer, and its shape."""

    layer: int
    part: str
    offset: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class KvLayout:
    """All pools of a group in one buffer, each [pages, kv_heads, page_size, width].

    Pools are ordered by layer, K before V. Latent pools are ordered by width, so that those of one
    width are contiguous. Logical page p of a sequence is entry p of its row in the page table. With
    a window, only the pages that a row can attend to are valid.
    """

    group: CacheGroup

    @property
    def name(self) -> str:
        """Name of the buffer in the plan."""
        return f"cache:{self.group.name}"

    @property
    def dtype(self) -> str:
        """Element type of the pools in a plan; fp8 is stored as bytes."""
        return self.group.stored_dtype

    @property
    def tokens_per_page(self) -> int:
        """Slots per page."""
        return self.group.page_size

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """All pools, in memory order."""
        g = self.group
        widths = [(layer, part, width) for layer in g.layers for part, width in _widths(g, layer)]
        if g.latent_widths:
            widths.sort(key=lambda pool: pool[2])
        pools, offset = [], 0
        for layer, part, width in widths:
            pools.append(Pool(layer, part, offset, (g.pages, g.kv_heads, g.page_size, width)))
            offset += g.pages * g.kv_heads * g.page_size * width * ITEM_BYTES[self.dtype]
        return tuple(pools)

    @property
    def stacks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Contiguous pools of one shape: (offset, [pools, pages, kv_heads, page_size, width])."""
        return tuple(
            (pools[0].offset, (len(pools), *shape))
            for shape, group in groupby(self.pools, key=lambda pool: pool.shape)
            if (pools := list(group))
        )

    @property
    def bytes_per_page(self) -> int:
        """Bytes per page over all layers."""
        g = self.group
        values = sum(width for layer in g.layers for _, width in _widths(g, layer))
        return g.kv_heads * g.page_size * values * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the buffer, including page 0."""
        return self.group.pages * self.bytes_per_page

    def logical_pages(self, limits: Limits) -> int:
        """Return the entries per sequence in the page table."""
        return -(-slots_per_sequence(limits) // self.group.page_size)

    def validate(self, model: TargetGeometry | DraftGeometry) -> None:
        """Raise EngineFileError if the group does not match ``model`` or is malformed."""
        g = self.group
        self._validate_widths(model)
        if g.page_size < MIN_PAGE_SIZE or g.page_size & (g.page_size - 1):
            raise OutdatedEngineError(
                f"cache group {g.name} has pages of {g.page_size} tokens, but kernels need a power "
                f"of two from {MIN_PAGE_SIZE} on"
            )
        may_be_quantized = g.name == INDEXER_GROUP or not g.latent_widths
        if g.dtype != KV_DTYPE and not (may_be_quantized and g.coded):
            raise OutdatedEngineError(
                f"cache group {g.name} holds {g.dtype}, but kernels need {KV_DTYPE}, or "
                f"{FP8_DTYPE} for keys and values"
            )
        self._validate_layers(model)

    def _validate_widths(self, model: TargetGeometry | DraftGeometry) -> None:
        g = self.group
        heads: Any = model
        if isinstance(model, TargetGeometry) and g.layers and 0 <= g.layers[0] < model.layers:
            heads = model.heads_of(g.layers[0])
        expected: tuple[int, ...] = (heads.kv_heads, heads.head_dim, heads.head_dim)
        actual: tuple[int, ...] = (g.kv_heads, g.k_width, g.v_width)
        if g.name == INDEXER_GROUP:
            indexer = model.indexer if isinstance(model, TargetGeometry) else None
            width = 0 if indexer is None else indexer.width
            expected = (1, *[width] * len(g.layers))
            actual = (g.kv_heads, *g.latent_widths)
        elif g.latent_widths:
            dims = model.latent_dims
            latent_dims = [dims[layer] for layer in g.layers if 0 <= layer < len(dims)]
            expected = (1, *map(padded_width, latent_dims))
            actual = (g.kv_heads, *g.latent_widths)
        if actual != expected:
            raise OutdatedEngineError(
                f"cache group {g.name} has heads and widths {actual}, but its model has {expected}"
            )

    def _validate_layers(self, model: TargetGeometry | DraftGeometry) -> None:
        g = self.group
        is_target, window = isinstance(model, TargetGeometry), model.sliding_window
        count = model.layers if is_target else model.cached_layers  # type: ignore[union-attr]
        if isinstance(model, TargetGeometry):
            kind = "sliding_attention" if g.window else "full_attention"
            if any(model.layer_types[layer] != kind for layer in g.layers if layer < count):
                raise EngineFileError(f"cache group {g.name} holds layers that are not {kind}")
            window = window if g.window else 0
        outside = [layer for layer in g.layers if not 0 <= layer < count]
        if outside or (count and not g.layers) or g.window != window:
            raise OutdatedEngineError(
                f"cache group {g.name} has layers {g.layers} and window {g.window}, but its "
                f"model has {count} layers and window {window}"
            )


def padded_width(latent: int) -> int:
    """Return the pool width for a latent of this many values, which are padded with zeros."""
    return -(-latent // _LATENT_STEP) * _LATENT_STEP


def layouts(groups: Sequence[CacheGroup], ranks: int = 1) -> dict[str, KvLayout]:
    """Return the layout of every group on one of so many ranks, by name."""
    return {group.name: KvLayout(group) for group in groups_of_rank(groups, ranks)}


def cache_bytes(groups: Sequence[CacheGroup]) -> int:
    """Return the bytes of the caches of all groups."""
    return sum(KvLayout(group).bytes for group in groups)


def validate_caches(
    groups: Sequence[CacheGroup], target: TargetGeometry, drafts: Mapping[str, DraftGeometry]
) -> None:
    """Raise EngineFileError if a group does not match its model.

    ``drafts`` holds the draft models by cache group.
    """
    for group in groups:
        model = drafts.get(group.name) if group.name in DRAFT_GROUPS else target
        if model is None:
            raise EngineFileError(f"cache group {group.name}: the engine has no draft")
        KvLayout(group).validate(model)


def _widths(group: CacheGroup, layer: int) -> list[tuple[str, int]]:
    return list(group.pool_widths(layer).items())
