"""The layout of recurrent states in device memory: what a slot holds beside the state itself.

A step stores what its rows change, and the next launch applies the accepted ones
(docs/developers/recurrent-states.md). Neither an empty slot nor one for discarded states is needed:
slot s of a group is entry s − 1 of its pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.cache_groups import slot_bytes
from specbuild.runtime.engine_dir.manifest import Limits, StateGroup
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

_ALIGNMENT = 256


@dataclass(frozen=True)
class StatePool:
    """A pool of a layer: its graph input, byte offset, element type and shape."""

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateLayout:
    """All pools of a group in one buffer; slots keep the factors of ``nodes`` rows."""

    group: StateGroup
    nodes: int

    @property
    def name(self) -> str:
        """Name of the buffer in the plan."""
        return f"cache:{self.group.name}"

    @property
    def slots(self) -> int:
        """Entries of the pools: one for each sequence of a full batch."""
        return self.group.slots - 2

    @property
    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Element type and shape of each pool of a layer, by its part."""
        g = self.group
        values = g.heads * g.value_width
        factors = values + (g.channels - values) // 2 + g.heads
        return {
            "tail": (g.dtype, (self.slots, g.tail + self.nodes, g.channels)),
            "state": ("float32", (self.slots, g.heads, g.key_width, g.value_width)),
            "factor": ("float32", (self.slots, self.nodes, factors)),
        }

    @cached_property
    def pools(self) -> tuple[StatePool, ...]:
        """The pools, layer by layer."""
        found: list[StatePool] = []
        offset = 0
        for layer in self.group.layers:
            for part, (dtype, shape) in self.parts.items():
                name = f"{self.group.name}.{layer}.{part}_pool"
                found.append(StatePool(name, offset, dtype, shape))
                offset += -(-prod(shape) * ITEM_BYTES[dtype] // _ALIGNMENT) * _ALIGNMENT
        return tuple(found)

    @property
    def bytes(self) -> int:
        """Bytes of the buffer."""
        last = self.pools[-1]
        return last.offset + prod(last.shape) * ITEM_BYTES[last.dtype]


def state_layout(group: StateGroup, limits: Limits) -> StateLayout:
    """Return the layout of a group for the largest draft that steps verify."""
    return StateLayout(group, limits.draft_tokens + 1)


def state_bytes(group: StateGroup, limits: Limits, backend: str) -> int:
    """Bytes of all pools of recurrent states of this group in an engine for ``backend``.

    Engines with a plan have no slots for zeros and for discarded states, but a place in each slot
    for the factors of the last step's rows.
    """
    if facts_of(backend).has_plan:
        return state_layout(group, limits).bytes
    return group.slots * slot_bytes(group)
