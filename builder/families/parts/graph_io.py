"""The inputs that every model graph takes: docs/developers/contracts.md#graphs names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, CacheGroup, StateGroup


class Launch(NamedTuple):
    """What one launch knows of its rows, beside their tokens."""

    positions: torch.Tensor
    row_start: torch.Tensor
    ancestor_bits: torch.Tensor
    logit_rows: torch.Tensor


class GroupView(NamedTuple):
    """How one cache group sees the launch's sequences.

    Where keys are rebuilt of latents, ``page_position`` [B, P] is the position of each page's
    first slot, [Lg, B, P] where each layer has a view of its own.
    """

    page_table: torch.Tensor
    row_slot: torch.Tensor
    tree_start: torch.Tensor
    write_slot: torch.Tensor
    page_position: torch.Tensor | None = None


class BlockView(NamedTuple):
    """What SpecPV asks of a launch: summaries to make, and views to choose, of the group ``view``.

    Per sequence: ``logical_pages`` [B, P] by position, summarised blocks before and after, the
    most blocks to choose, and the rows of its tree. ``partial_table`` [Lg, B, kv_heads, V].
    """

    logical_pages: torch.Tensor
    first_block: torch.Tensor
    blocks: torch.Tensor
    budget: torch.Tensor
    tree_count: torch.Tensor
    partial_table: torch.Tensor


class LayerBlocks(NamedTuple):
    """One layer's part of SpecPV: its table among its group's, the launch's, its own."""

    place: int
    view: BlockView
    summary_pool: torch.Tensor
    partial_table: torch.Tensor


class LayerIndex(NamedTuple):
    """One layer's part of DSA: its place among the page tables, and its keys' pool.

    ``budget`` [B] is how many tokens a sequence's rows may choose, −1 for all.
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
    """The only pool of a layer that caches a latent in its keys' and values' place."""

    c: torch.Tensor


class StatePools(NamedTuple):
    """The recurrent state of a layer, and the last inputs of its convolution."""

    tail: torch.Tensor
    state: torch.Tensor


class WrittenStates(NamedTuple):
    """The pools of a layer with a state after a launch, and what the rows brought to it [T, W]."""

    tail: torch.Tensor
    state: torch.Tensor
    inputs: torch.Tensor


class StateView(NamedTuple):
    """How rows go through the states of a group: paths [S, L], the slots that they read and write.

    See docs/developers/recurrent-states.md.
    """

    path_rows: torch.Tensor
    read_slot: torch.Tensor
    write_slot: torch.Tensor


Pools: TypeAlias = LayerPools | LatentPool | StatePools


def layer_pools(ports: Sequence[InputPort], values: Sequence[Any]) -> Pools:
    """The pools of one layer: keys and values, a latent, or a state, of what its ports give."""
    if ports[-1].name.endswith("state_pool"):
        return StatePools(*values)
    return LatentPool(*values) if len(values) == 1 else LayerPools(*values)


def layer_view(ports: Sequence[InputPort], values: Sequence[Any]) -> GroupView | StateView:
    """How a layer's group sees the launch, of what the group's ports give."""
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
    """The ports of a :class:`StateView`."""
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
    """The ports of a :class:`GroupView`; each layer has ``views`` of its own, or all share one.

    Where keys are rotated when they are read, attention is told where each page stands.
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
    """The ports of a :class:`BlockView`, whose partial tables have this many entries."""

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
    """The port of how many tokens each sequence's rows may choose (DSA)."""
    return InputPort(f"{INDEXER_GROUP}.top_k", torch.int32, (batch,))


def summary_port(group: CacheGroup, layer: int, dtype: torch.dtype) -> InputPort:
    """The port of one layer's block summaries, in portable axis order."""
    shape = (group.pages, group.kv_heads, 2, group.k_width)
    return InputPort(f"{group.name}.{layer}.summary_pool", dtype, shape)


def pool_ports(group: CacheGroup, layer: int, dtype: torch.dtype) -> tuple[InputPort, ...]:
    """The ports of one layer's pools, in portable axis order."""
    return tuple(
        InputPort(
            f"{group.name}.{layer}.{part}_pool",
            dtype,
            (group.pages, group.kv_heads, group.page_size, width),
        )
        for part, width in group.pool_widths(layer).items()
    )


def state_ports(group: StateGroup, layer: int, dtype: torch.dtype) -> tuple[InputPort, ...]:
    """The ports of one layer's :class:`StatePools`."""
    kinds = {"tail": dtype, "state": torch.float32}
    return tuple(
        InputPort(f"{group.name}.{layer}.{part}_pool", kinds[part], shape)
        for part, (_, shape) in group.pool_shapes.items()
    )


def state_inputs_port(group: StateGroup, layer: int, dtype: torch.dtype) -> InputPort:
    """The port of what a layer's rows bring to its state: an output of the target."""
    return InputPort(f"{group.name}.{layer}.inputs", dtype, ("T", group.row_width))


def output_name(pool: str) -> str:
    """The name of the graph output that aliases this pool input."""
    return f"{pool}.out"
