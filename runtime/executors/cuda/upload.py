"""Loads weights from file to device: reads, checks and copies chunks concurrently."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specbuild.runtime.engine_dir.manifest import StoredFile
from specbuild.runtime.engine_dir.regular_file import open_regular
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle, HostMemory

MAX_READERS = 12
# Chunks in flight: one per reader, and some that are being copied.
CHUNKS_IN_FLIGHT = MAX_READERS + 4
MAX_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, order=True)
class Piece:
    """``bytes`` of a file from ``offset`` on that belong at ``address``."""

    offset: int
    bytes: int
    address: int


@dataclass(frozen=True)
class _Buffer:
    """Page-locked memory for one chunk, and the event after the copies that read it."""

    memory: HostMemory
    copied: Handle


class WeightsUpload:
    """Stream one chunked file to the device.

    Readers read chunks from the page cache directly into page-locked memory and hash them there,
    while earlier chunks are copied: the file is read once. ``check(i, digest)`` raises if a chunk
    is damaged; its bytes may have reached the device by then, but nothing runs on them.
    """

    def __init__(
        self,
        gpu: Gpu,
        stream: Handle,
        *,
        readers: int,
        check: Callable[[int, str], None],
    ) -> None:
        self._gpu = gpu
        self._stream = stream
        self._readers = max(1, min(readers, MAX_READERS))
        self._check = check

    def run(self, path: Path, entry: StoredFile, pieces: Sequence[Piece]) -> None:
        """All pieces are on the device when the stream has reached this point."""
        size = entry.chunk_bytes
        if size is None or size > MAX_CHUNK_BYTES:
            raise OutdatedEngineError(
                f"{path} is not stored in chunks of at most {MAX_CHUNK_BYTES} bytes"
            )
        placed = _Placement(pieces)
        count = len(entry.chunks)
        buffers = self._allocate(min(self._readers + 4, CHUNKS_IN_FLIGHT, count), size)
        descriptor = open_regular(path.parent, path.name)
        try:
            with ThreadPoolExecutor(self._readers, thread_name_prefix="weights") as pool:
                waiting: deque[tuple[int, _Buffer, Future[str]]] = deque()
                for i in range(count):
                    buffer = buffers[i % len(buffers)]
                    if len(waiting) == len(buffers):
                        self._copy(*waiting.popleft(), size, placed)
                    self._gpu.wait(buffer.copied)
                    start = i * size
                    view = buffer.memory.view[: min(size, entry.bytes - start)]
                    future = pool.submit(_read, descriptor, view, start, path)
                    waiting.append((i, buffer, future))
                while waiting:
                    self._copy(*waiting.popleft(), size, placed)
            self._gpu.synchronize(self._stream)
        finally:
            os.close(descriptor)
            for buffer in buffers:
                self._gpu.wait(buffer.copied)
                self._gpu.release_host(buffer.memory)

    def _allocate(self, count: int, size: int) -> list[_Buffer]:
        return [_Buffer(self._gpu.allocate_host(size), self._gpu.new_event()) for _ in range(count)]

    def _copy(
        self, chunk: int, buffer: _Buffer, digest: Future[str], size: int, placed: _Placement
    ) -> None:
        """Queue the copies of a chunk after it was read."""
        self._check(chunk, digest.result())
        start = chunk * size
        for piece in placed.within(start, start + size):
            source = buffer.memory.address + piece.offset - start
            self._gpu.upload(piece.address, source, piece.bytes, self._stream)
        self._gpu.record(buffer.copied, self._stream)


class _Placement:
    """The pieces of a file, in order of their offsets."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = sorted(piece for piece in pieces if piece.bytes)
        self._starts = [piece.offset for piece in self._pieces]
        # A region may have several destinations, and none is longer than this.
        self._longest = max((piece.bytes for piece in self._pieces), default=0)

    def within(self, first: int, end: int) -> list[Piece]:
        """Yield the parts of pieces between two offsets of the file."""
        parts = []
        for i in range(bisect_right(self._starts, first - self._longest), len(self._pieces)):
            piece = self._pieces[i]
            if piece.offset >= end:
                break
            start, stop = max(piece.offset, first), min(piece.offset + piece.bytes, end)
            if start < stop:
                parts.append(Piece(start, stop - start, piece.address + start - piece.offset))
        return parts


def _read(descriptor: int, view: np.ndarray, offset: int, path: Path) -> str:
    """Fill ``view`` from the file, concurrently, and return the XXH3-128 of its bytes."""
    from xxhash import xxh3_128_hexdigest

    data = view.data
    done = 0
    while done < len(data):
        count = os.preadv(descriptor, [data[done:]], offset + done)
        if count == 0:
            raise EngineFileError(
                f"{path} ends at byte {offset + done}, the manifest says more; copy the engine "
                "again or rebuild it"
            )
        done += count
    return xxh3_128_hexdigest(data)
