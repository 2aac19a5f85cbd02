"""The inputs that every model graph takes, and how they are named and shaped (contracts.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbuild.runtime.manifest import CacheGroup


class Launch(NamedTuple):
    """What one launch knows of its rows, beside their tokens."""

    positions: torch.Tensor
    row_start: torch.Tensor
    ancestor_bits: torch.Tensor
    logit_rows: torch.Tensor


class GroupView(NamedTuple):
    """How one cache group sees the launch's sequences.

    Where the cache is latent, ``page_position`` [B, P] is the position of each page's first slot.
    """

    page_table: torch.Tensor
    row_slot: torch.Tensor
    tree_start: torch.Tensor
    write_slot: torch.Tensor
    page_position: torch.Tensor | None = None


class LayerPools(NamedTuple):
    """The key and value pools of one layer."""

    k: torch.Tensor
    v: torch.Tensor


class LatentPool(NamedTuple):
    """The only pool of a layer that caches a latent in its keys' and values' place."""

    c: torch.Tensor


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


def view_ports(group: CacheGroup, batch: int | str) -> tuple[InputPort, ...]:
    """The ports of a :class:`GroupView`."""
    pages = f"P_{group.name}"
    latent = (InputPort(f"{group.name}.page_position", torch.int32, (batch, pages)),)
    return (
        InputPort(f"{group.name}.page_table", torch.int32, (1, batch, 1, pages)),
        InputPort(f"{group.name}.row_slot", torch.int32, ("T",)),
        InputPort(f"{group.name}.tree_start", torch.int32, (batch,)),
        InputPort(f"{group.name}.write_slot", torch.int32, ("T",)),
        *(latent if group.latent_widths else ()),
    )


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


def output_name(pool: str) -> str:
    """The name of the graph output that aliases this pool input."""
    return f"{pool}.out"
