"""Copies of recurrent states in page-locked memory, in the order of the stream."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

from specbuild.runtime.cache.state_layout import StateLayout
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle


class DeviceStateCopies:
    """See :class:`StateCopies`; a copy is the number of a piece of page-locked memory.

    ``address`` is that of the buffer of ``layout``. The memory of all ``capacity`` copies is
    allocated at once: allocating it while requests wait would delay them. All copies are queued on
    ``stream``. A copied slot must have no rows to replay, as after a launch of a prompt: then it
    consists of the state and the convolution's first inputs.
    """

    def __init__(
        self, gpu: Gpu, stream: Handle, address: int, layout: StateLayout, capacity: int
    ) -> None:
        self._gpu = gpu
        self._stream = stream
        tail, kinds = layout.group.tail, ("tail", "state")
        sizes: list[int] = []
        # Of each pool that is copied: its address, and the bytes of one slot.
        self._pools: list[tuple[int, int]] = []
        for pool in layout.pools:
            if not pool.name.endswith(tuple(f".{kind}_pool" for kind in kinds)):
                continue
            slot = prod(pool.shape[1:]) * ITEM_BYTES[pool.dtype]
            is_tail = pool.name.endswith(".tail_pool")
            sizes.append(slot * tail // pool.shape[1] if is_tail else slot)
            self._pools.append((address + pool.offset, slot))
        self._offsets = list(accumulate(sizes, initial=0))
        self._memory = gpu.allocate_host(capacity * self._offsets[-1])
        self._free = list(range(capacity))

    def save(self, slot: int) -> int:
        """See :class:`StateCopies`."""
        number = self._free.pop()
        for host, device, nbytes in self._pieces(number, slot):
            self._gpu.download(host, device, nbytes, self._stream)
        return number

    def restore(self, saved: int, slot: int) -> None:
        """See :class:`StateCopies`."""
        for host, device, nbytes in self._pieces(saved, slot):
            self._gpu.upload(device, host, nbytes, self._stream)

    def discard(self, saved: int) -> None:
        """See :class:`StateCopies`; a later copy is written after what is queued has read it."""
        self._free.append(saved)

    def close(self) -> None:
        """Gives the memory back."""
        self._gpu.release_host(self._memory)

    def _pieces(self, number: int, slot: int) -> list[tuple[int, int, int]]:
        """Host address, device address and bytes of each part; slot s is entry s − 1."""
        base = self._memory.address + number * self._offsets[-1]
        return [
            (base + first, pool + (slot - 1) * stride, end - first)
            for (first, end), (pool, stride) in zip(
                pairwise(self._offsets), self._pools, strict=True
            )
        ]
