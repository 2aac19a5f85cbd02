"""The inputs of every model graph; see docs/developers/contracts.md#graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, CacheGroup, StateGroup


class Launch(NamedTuple):
    """The inputs that describe the rows of a launch, without their tokens."""

    positions: torch.Tensor
    row_start: torch.Tensor
    ancestor_bits: torch.Tensor
    logit_rows: torch.Tensor


class GroupView(NamedTuple):
    """The view of one cache group on the launch's sequences.

    If keys are rebuilt from latents, ``page_position`` [B, P] is the position of each page's first
    slot, or [Lg, B, P] if layers have separate views.
    """

    page_table: torch.Tensor
    row_slot: torch.Tensor
    tree_start: torch.Tensor
    write_slot: torch.Tensor
    page_position: torch.Tensor | None = None


class BlockView(NamedTuple):
    """SpecPV's inputs of a launch: blocks to summarize and to select for the group ``view``.

    Per sequence: ``logical_pages`` [B, P] by position, the numbers of summarized blocks before and
    after, the maximum number of selected blocks, and the rows of the tree. ``partial_table`` is
    [Lg, B, kv_heads, V].
    """

    logical_pages: torch.Tensor
    first_block: torch.Tensor
    blocks: torch.Tensor
    budget: torch.Tensor
    tree_count: torch.Tensor
    partial_table: torch.Tensor


class LayerBlocks(NamedTuple):
    """SpecPV's inputs of one layer: its table's index, the launch's view, summaries and table."""

    place: int
    view: BlockView
    summary_pool: torch.Tensor
    partial_table: torch.Tensor


class LayerIndex(NamedTuple):
    """DSA's inputs of one layer: its page table's index, the view, and the pool of keys.

    ``budget`` [B] is the number of tokens that a sequence's rows can select, −1 for all.
    """

    place: int
    view: GroupView
    budget: torch.Tensor
    key_pool: torch.Tensor


class LayerPools(NamedTuple):
    """The key and value pools of one layer."""

    k: torch.Tensor
    v: torch.Tensor


class LatentPool(NamedTuple):
    """The only pool of a layer that caches latents instead of keys and values."""

    c: torch.Tensor


class StatePools(NamedTuple):
    """The recurrent state of a layer, and the last inputs of its convolution."""

    tail: torch.Tensor
    state: torch.Tensor


class WrittenStates(NamedTuple):
    """The pools of a layer with a state after a launch, and the rows' inputs [T, W]."""

    tail: torch.Tensor
    state: torch.Tensor
    inputs: torch.Tensor


class StateView(NamedTuple):
    """How rows update the states of a group: paths [S, L], and the slots to read and write.

    See docs/developers/recurrent-states.md.
    """

    path_rows: torch.Tensor
    read_slot: torch.Tensor
    write_slot: torch.Tensor


Pools: TypeAlias = LayerPools | LatentPool | StatePools


def layer_pools(ports: Sequence[InputPort], values: Sequence[Any]) -> Pools:
    """Return the pools of one layer from the values of its ports: K and V, latent, or state."""
    if ports[-1].name.endswith("state_pool"):
        return StatePools(*values)
    return LatentPool(*values) if len(values) == 1 else LayerPools(*values)


def layer_view(ports: Sequence[InputPort], values: Sequence[Any]) -> GroupView | StateView:
    """Return the view of a layer's group from the values of the group's ports."""
    if ports[0].name.endswith("path_rows"):
        return StateView(*values)
    return GroupView(*values)


@dataclass(frozen=True)
class InputPort:
    """A graph input: name, torch dtype, and shape (a string is a dynamic axis)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


LAUNCH_PORTS = (
    InputPort("positions", torch.int32, ("T",)),
    InputPort("row_start", torch.int32, ("B1",)),
    InputPort("ancestor_bits", torch.int32, ("T", "W")),
    InputPort("logit_rows", torch.int32, ("R",)),
)


def path_ports(group: StateGroup) -> tuple[InputPort, ...]:
    """Return the ports of a :class:`StateView`."""
    return (
        InputPort(f"{group.name}.path_rows", torch.int32, ("S", "L")),
        InputPort(f"{group.name}.read_slot", torch.int32, ("S",)),
        InputPort(f"{group.name}.write_slot", torch.int32, ("S",)),
    )


def view_ports(
    group: CacheGroup,
    batch: int | str,
    *,
    views: int | None = None,
    rotated_when_read: bool = False,
) -> tuple[InputPort, ...]:
    """Return the ports of a :class:`GroupView`; each layer has ``views`` tables, or all share one.

    If keys are rotated when they are read, attention also receives the position of each page.
    """
    layers = 1 if views is None else len(group.layers)
    rotated_when_read = rotated_when_read and group.name != INDEXER_GROUP
    pages = f"P_{group.name}"
    position = (batch, pages) if views is None else (layers, batch, pages)
    latent = (InputPort(f"{group.name}.page_position", torch.int32, position),)
    return (
        InputPort(f"{group.name}.page_table", torch.int32, (layers, batch, views or 1, pages)),
        InputPort(f"{group.name}.row_slot", torch.int32, ("T",)),
        InputPort(f"{group.name}.tree_start", torch.int32, (batch,)),
        InputPort(f"{group.name}.write_slot", torch.int32, ("T",)),
        *(latent if rotated_when_read else ()),
    )


def block_ports(group: CacheGroup, batch: int | str, entries: int) -> tuple[InputPort, ...]:
    """Return the ports of a :class:`BlockView`, whose partial tables have this many entries."""

    def ints(name: str, *shape: int | str) -> InputPort:
        return InputPort(f"{group.name}.{name}", torch.int32, shape)

    return (
        ints("logical_pages", batch, f"L_{group.name}"),
        ints("first_block", batch),
        ints("blocks", batch),
        ints("budget", batch),
        ints("tree_count", batch),
        ints("partial_table", len(group.layers), batch, group.kv_heads, entries),
    )


def budget_port(batch: int | str) -> InputPort:
    """Return the port of the number of tokens that each sequence's rows can select (DSA)."""
    return InputPort(f"{INDEXER_GROUP}.top_k", torch.int32, (batch,))


def summary_port(group: CacheGroup, layer: int, dtype: torch.dtype) -> InputPort:
    """Return the port of one layer's block summaries, in portable axis order."""
    shape = (group.pages, group.kv_heads, 2, group.k_width)
    return InputPort(f"{group.name}.{layer}.summary_pool", dtype, shape)


def pool_ports(group: CacheGroup, layer: int, dtype: torch.dtype) -> tuple[InputPort, ...]:
    """Return the ports of one layer's pools, in portable axis order."""
    return tuple(
        InputPort(
            f"{group.name}.{layer}.{part}_pool",
            dtype,
            (group.pages, group.kv_heads, group.page_size, width),
        )
        for part, width in group.pool_widths(layer).items()
    )


def state_ports(group: StateGroup, layer: int, dtype: torch.dtype) -> tuple[InputPort, ...]:
    """Return the ports of one layer's :class:`StatePools`."""
    kinds = {"tail": dtype, "state": torch.float32}
    return tuple(
        InputPort(f"{group.name}.{layer}.{part}_pool", kinds[part], shape)
        for part, (_, shape) in group.pool_shapes.items()
    )


def state_inputs_port(group: StateGroup, layer: int, dtype: torch.dtype) -> InputPort:
    """Return the port of a layer's inputs of its state: an output of the target."""
    return InputPort(f"{group.name}.{layer}.inputs", dtype, ("T", group.row_width))


def output_name(pool: str) -> str:
    """Return the name of the graph output that aliases this pool input."""
    return f"{pool}.out"
