"""Run the kernels of several ranks at once in the emulator: see ``emulated/ranks.cpp``."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from emulation import Guarded, compiled_path, emulator_library, guarded, held_arguments

from specbuild.plugins_cuda.launches import Kernel, OpLaunch

DONE, STUCK, GAVE_UP = range(3)
Memory = Mapping[str, Guarded]


class _RankLaunch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("rank", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("arguments", ctypes.c_void_p),
    )


class RankEmulator:
    """Several ranks. Each has its own copy of every kernel, with its static shared memory."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = TemporaryDirectory()
        self._entries: dict[tuple[int, Kernel], Any] = {}

    def run(
        self, launches: Sequence[Sequence[OpLaunch]], memories: Sequence[Memory], seed: int
    ) -> int:
        """Run each rank's launches in order; return ``DONE``, ``STUCK`` or ``GAVE_UP``.

        ``seed`` determines which rank runs next, and when a word stored for another rank arrives.
        """
        alive: list[Any] = []
        queued = []
        for rank, of_rank in enumerate(launches):
            for launch in of_rank:
                held = held_arguments(launch, memories, rank)
                pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
                alive += [held, pointers]
                entry = ctypes.cast(self._entry(rank, launch.kernel), ctypes.c_void_p)
                grid = (ctypes.c_uint * 3)(*launch.grid)
                address = ctypes.addressof(pointers)
                queued.append(_RankLaunch(entry, rank, launch.block, grid, address))
        array = (_RankLaunch * len(queued))(*queued)
        run = emulator_library().emulation_run_ranks
        found = run(array, len(queued), self.ranks, ctypes.c_uint64(seed))
        assert all(place.untouched() for memory in memories for place in memory.values())
        return int(found)

    def _entry(self, rank: int, kernel: Kernel) -> Any:
        if (rank, kernel) not in self._entries:
            copy = Path(self._folder.name) / f"{rank}.{len(self._entries)}.so"
            shutil.copy(compiled_path(kernel), copy)
            self._entries[rank, kernel] = ctypes.CDLL(str(copy)).run_kernel
        return self._entries[rank, kernel]


def placed(arrays: Mapping[str, np.ndarray]) -> dict[str, Guarded]:
    """Return a rank's memory with these tensors."""
    return {name: guarded(array) for name, array in arrays.items()}
