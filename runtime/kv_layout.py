"""How a cache group lies in device memory, and what that takes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.kv_pool import DRAFT_GROUP, slots_per_sequence
from specbuild.runtime.manifest import CacheGroup, DraftGeometry, Limits, TargetGeometry

KV_DTYPE = "bfloat16"
_BYTES_PER_VALUE = 2
_PARTS = ("k", "v")
MIN_PAGE_SIZE = 16


@dataclass(frozen=True)
class KvLayout:
    """All pools of a group in one buffer: [layers, 2 (K, V), pages, kv_heads, page_size, width].

    Logical page p of a sequence is entry p of its row of the page table. Where the group keeps
    every position each entry is a page of its own; with a window the sequence has ``ring_pages``
    of them and entry p repeats entry ``p mod ring_pages``.
    """

    group: CacheGroup

    @property
    def name(self) -> str:
        """The buffer's name in the plan."""
        return f"cache:{self.group.name}"

    @property
    def dtype(self) -> str:
        """Element type of the pools."""
        return self.group.dtype

    @property
    def tokens_per_page(self) -> int:
        """Slots of a page."""
        return self.group.page_size

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """One layer's K, or V: [pages, kv_heads, page_size, width]."""
        g = self.group
        return (g.pages, g.kv_heads, g.page_size, g.k_width)

    @property
    def shape(self) -> tuple[int, ...]:
        """All pools at once: [layers · 2, pages, kv_heads, page_size, width]."""
        return (2 * len(self.group.layers), *self.pool_shape)

    @property
    def bytes_per_page(self) -> int:
        """What a page takes over all layers, K and V."""
        g = self.group
        per_layer = 2 * g.kv_heads * g.page_size * g.k_width * _BYTES_PER_VALUE
        return len(g.layers) * per_layer

    @property
    def bytes(self) -> int:
        """What the buffer takes, page 0 included."""
        return self.group.pages * self.bytes_per_page

    def pool_offset(self, layer: int, part: str) -> int:
        """Where the pool of a model's layer begins; ``part`` is ``k`` or ``v``."""
        g = self.group
        pool = g.pages * g.kv_heads * g.page_size * g.k_width * _BYTES_PER_VALUE
        return (2 * g.layers.index(layer) + _PARTS.index(part)) * pool

    def logical_pages(self, limits: Limits) -> int:
        """Entries of a sequence's row of the page table."""
        return -(-slots_per_sequence(limits) // self.group.page_size)

    def validate(self, model: TargetGeometry | DraftGeometry) -> None:
        """Raises EngineFileError where the group's caches are none of ``model``'s, or malformed."""
        g = self.group
        wanted = (model.kv_heads, model.head_dim, model.head_dim)
        found = (g.kv_heads, g.k_width, g.v_width)
        if found != wanted:
            raise EngineFileError(
                f"cache group {g.name} has heads and widths {found}, its model {wanted}; "
                "rebuild the engine"
            )
        if g.page_size < MIN_PAGE_SIZE or g.page_size & (g.page_size - 1):
            raise EngineFileError(
                f"cache group {g.name} has pages of {g.page_size} tokens, kernels take powers of "
                f"two from {MIN_PAGE_SIZE} on; rebuild the engine"
            )
        if g.dtype != KV_DTYPE:
            raise EngineFileError(
                f"cache group {g.name} holds {g.dtype}, kernels take {KV_DTYPE}; rebuild the engine"
            )
        self._validate_layers(model)

    def _validate_layers(self, model: TargetGeometry | DraftGeometry) -> None:
        g = self.group
        count = 1 if isinstance(model, DraftGeometry) else model.layers
        window = model.sliding_window
        if isinstance(model, TargetGeometry):
            kind = "sliding_attention" if g.window else "full_attention"
            if any(model.layer_types[layer] != kind for layer in g.layers if layer < count):
                raise EngineFileError(f"cache group {g.name} holds layers that are not {kind}")
            window = window if g.window else 0
        outside = [layer for layer in g.layers if not 0 <= layer < count]
        if outside or not g.layers or g.window != window:
            raise EngineFileError(
                f"cache group {g.name} has layers {g.layers} and window {g.window}, its model "
                f"{count} layers and window {window}; rebuild the engine"
            )


def layouts(groups: Sequence[CacheGroup]) -> dict[str, KvLayout]:
    """The layout of every group, by the group's name."""
    return {group.name: KvLayout(group) for group in groups}


def cache_bytes(groups: Sequence[CacheGroup]) -> int:
    """What the caches of all groups take together."""
    return sum(KvLayout(group).bytes for group in groups)


def validate_caches(
    groups: Sequence[CacheGroup], target: TargetGeometry, draft: DraftGeometry | None
) -> None:
    """Raises EngineFileError where a group does not fit the model that it belongs to."""
    for group in groups:
        model = draft if group.name == DRAFT_GROUP else target
        if model is None:
            raise EngineFileError(f"cache group {group.name}: the engine has no draft")
        KvLayout(group).validate(model)
