"""Recurrent states: the slot of each sequence, and the paths of rows through them.

A state cannot be rewound. So a launch that verifies drafts stores no state; when the accepted rows
are known, ``commit`` computes the state again from what these rows brought to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specbuild.runtime.cache.page_pool import PagePool
from specbuild.runtime.cache.sequence_pages import FixedPages, SequencePages
from specbuild.runtime.engine_dir.manifest import StateGroup

_EMPTY = 0  # the slot that holds zeros


class StateSlot(FixedPages):
    """The slot of a sequence's states, allocated at admission as the only page of a pool.

    ``source`` is the slot to read next: the empty one, until a launch has stored a state.
    ``snapshot`` is the number of the snapshot to start from, ``captured`` that of one which is not
    published yet, after the number of pages before it.
    """

    def __init__(self, pool: PagePool, *, owner: int = 0, snapshot: int | None = None) -> None:
        super().__init__(pool, page_size=1, window=0, capacity=1, reserved=1, owner=owner)
        self.source = _EMPTY
        self.snapshot = snapshot
        self.captured: tuple[int, int] | None = None

    @property
    def slot(self) -> int:
        """The slot that launches of this sequence write."""
        return int(self.table[0])


def path_feeds(
    group: StateGroup,
    holders: Sequence[SequencePages],
    paths: Sequence[tuple[int, Sequence[int]]],
    *,
    stores: bool,
) -> dict[str, np.ndarray]:
    """Return ``path_rows [S,L]``, ``read_slot [S]`` and ``write_slot [S]`` of a launch.

    ``paths`` are pairs of a sequence's place in ``holders`` and rows of the launch, in order. With
    ``stores`` each sequence has one path, and its slot holds the state after the launch.
    """
    longest = max(len(rows) for _, rows in paths)
    table = np.full((len(paths), longest), -1, np.int32)
    read, write = np.empty((2, len(paths)), np.int32)
    for place, (b, rows) in enumerate(paths):
        holder = holders[b]
        assert isinstance(holder, StateSlot)
        table[place, : len(rows)] = rows
        read[place] = holder.source
        write[place] = holder.slot if stores else group.discarded
        if stores:
            holder.source = holder.slot
    name = group.name
    return {f"{name}.path_rows": table, f"{name}.read_slot": read, f"{name}.write_slot": write}


def replayed_inputs(group: StateGroup, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what rows of a target's launch brought to the states, as inputs of ``commit``."""
    names = (f"{group.name}.{layer}.inputs" for layer in group.layers)
    return {name: outputs[name] for name in names}
