"""Measures the read bandwidth of the GPU's and the host's memory, as a reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from specbuild.runtime.executors.cuda.gpu import Gpu, Handle, LaunchConfig

READ_BYTES = 8 << 30
# More than the last-level cache.
_HOST_READ_BYTES = 512 << 20
_NOISE_BYTES = 64 << 20
_VECTOR_BYTES, _CHECKSUM_BYTES = 16, 512
_LAUNCHES, _REPEATS, _WARM_UP = 4, 10, 2
_HOST_REPEATS = 5


@dataclass(frozen=True)
class ReadKernel:
    """A kernel that reads ``vectors`` of 16 bytes once: (data, checksum [1] u32, int32 vectors).

    It is launched with a block of 1024 threads on every multiprocessor.
    """

    cubin: bytes
    entry: str


def streaming_read(gpu: Gpu, kernel: ReadKernel, *, nbytes: int = READ_BYTES) -> float:
    """Return the bytes per second of a plain read of random data, at most half of free memory.

    Raises UnsupportedHereError if the memory cannot be allocated.
    """
    nbytes = min(nbytes, gpu.free_bytes() // 2) // _NOISE_BYTES * _NOISE_BYTES or _NOISE_BYTES
    stream = gpu.new_stream()
    data = gpu.allocate(nbytes + _CHECKSUM_BYTES)
    try:
        _fill_with_noise(gpu, data, nbytes, stream)
        function = gpu.function(gpu.load_module(kernel.cubin, kernel.entry), kernel.entry)
        arguments = np.array([data, data + nbytes, nbytes // _VECTOR_BYTES], np.uint64)
        pointers = arguments.ctypes.data + 8 * np.arange(len(arguments), dtype=np.uint64)
        grid = (gpu.facts.multiprocessors, 1, 1)
        config = LaunchConfig(function, grid, 1024, 0, False, pointers.ctypes.data)
        return _LAUNCHES * nbytes / _median_s(gpu, config, stream)
    finally:
        gpu.synchronize(stream)
        gpu.release(data)


def host_streaming_read(threads: int) -> float:
    """Return the bytes per second that ``threads`` threads read, the median of five reads."""
    words = np.arange(_HOST_READ_BYTES // 8, dtype=np.uint64)
    parts = np.array_split(words, threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + _HOST_REPEATS):
            started_s = perf_counter()
            list(pool.map(np.bitwise_xor.reduce, parts))
            times.append(perf_counter() - started_s)
    return words.nbytes / median(times[1:])


def _fill_with_noise(gpu: Gpu, address: int, nbytes: int, stream: Handle) -> None:
    noise = gpu.allocate_host(_NOISE_BYTES)
    try:
        random = np.random.default_rng(0)
        noise.view[:] = random.integers(0, 256, _NOISE_BYTES, dtype=np.uint8)
        for offset in range(0, nbytes, _NOISE_BYTES):
            gpu.upload(address + offset, noise.address, _NOISE_BYTES, stream)
        gpu.synchronize(stream)
    finally:
        gpu.release_host(noise)


def _median_s(gpu: Gpu, config: LaunchConfig, stream: Handle) -> float:
    first, last = gpu.new_event(timed=True), gpu.new_event(timed=True)
    times = []
    for i in range(_WARM_UP + _REPEATS):
        gpu.record(first, stream)
        for _ in range(_LAUNCHES):
            gpu.launch(config, stream)
        gpu.record(last, stream)
        gpu.synchronize(stream)
        if i >= _WARM_UP:
            times.append(gpu.elapsed_s(first, last))
    return median(times)
