"""Small copies without waiting, through a ring of page-locked memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specbuild.runtime.executors.cuda.gpu import Gpu, Handle
from specbuild.runtime.executors.cuda.memory import ALIGNMENT, STAGING_BYTES

# The maximum number of outstanding reads, and of bytes of each.
FETCHES, FETCH_BYTES = 8, 64 << 10


class Staging:
    """Copies arrays to and from the device through page-locked memory.

    A piece of it is reused only after the stream has passed the copy that reads it: at the end of
    the memory the stream is waited for once.
    """

    def __init__(self, gpu: Gpu, stream: Handle, nbytes: int = STAGING_BYTES) -> None:
        self._gpu = gpu
        self._stream = stream
        self._memory = gpu.allocate_host(nbytes)
        self._used = 0

    def upload(self, address: int, values: np.ndarray) -> None:
        """Queue the copy of an array; the array may change after the call."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for first in range(0, len(data), len(self._memory.view)):
            piece = data[first : first + len(self._memory.view)]
            place = self._take(len(piece))
            self._memory.view[place : place + len(piece)] = piece
            source = self._memory.address + place
            self._gpu.upload(address + first, source, len(piece), self._stream)

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """Return device memory as uint8 [bytes], after all previously queued work."""
        data = np.empty(nbytes, np.uint8)
        for first in range(0, nbytes, len(self._memory.view)):
            size = min(len(self._memory.view), nbytes - first)
            place = self._take(size)
            target = self._memory.address + place
            self._gpu.download(target, address + first, size, self._stream)
            self._gpu.synchronize(self._stream)
            data[first : first + size] = self._memory.view[place : place + size]
        return data

    def close(self) -> None:
        """Release the memory."""
        self._gpu.release_host(self._memory)

    def _take(self, size: int) -> int:
        if self._used + size > len(self._memory.view):
            self._gpu.synchronize(self._stream)
            self._used = 0
        place = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return place


class Fetches:
    """Reads that do not wait for work queued after them.

    ``FETCHES`` may be outstanding: each has its own page-locked memory and event.
    """

    def __init__(self, gpu: Gpu, stream: Handle) -> None:
        self._gpu = gpu
        self._stream = stream
        self._memory = gpu.allocate_host(FETCHES * FETCH_BYTES)
        self._marks = [gpu.new_event() for _ in range(FETCHES)]
        self._started = 0

    def start(self, address: int, nbytes: int) -> Callable[[], np.ndarray]:
        """Queue the copy of device memory; the returned function waits for it: uint8 [bytes]."""
        assert nbytes <= FETCH_BYTES
        entry, self._started = self._started, (self._started + 1) % FETCHES
        mark, place = self._marks[entry], entry * FETCH_BYTES
        self._gpu.download(self._memory.address + place, address, nbytes, self._stream)
        self._gpu.record(mark, self._stream)

        def arrived() -> np.ndarray:
            self._gpu.wait(mark)
            return self._memory.view[place : place + nbytes].copy()

        return arrived

    def close(self) -> None:
        """Release the memory."""
        self._gpu.release_host(self._memory)
