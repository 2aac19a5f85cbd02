"""Named cases of GatedDelta."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

TAPS = 4
# Slot 0 has the zeros from which sequences start; the last one is never read.
SLOTS = 6
DISCARDED = SLOTS - 1

Path = tuple[Sequence[int], int, int]


def padded_paths(paths: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the paths as int32 [S, L], padded with −1."""
    longest = max(map(len, paths))
    return np.array([[*rows, *[-1] * (longest - len(rows))] for rows in paths], np.int32)


def delta(
    name: str,
    *paths: Path,
    key_heads: int = 2,
    value_heads: int = 4,
    key_width: int = 8,
    value_width: int = 8,
) -> Case:
    """``paths`` are (rows, slot to read, slot to write)."""
    channels = 2 * key_heads * key_width + value_heads * value_width
    count = 1 + max(row for rows, _, _ in paths for row in rows)

    def make(rng: np.random.Generator) -> Arrays:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        tails = normal(SLOTS, TAPS - 1, channels)
        states = normal(SLOTS, value_heads, key_width, value_width)
        tails[0] = states[0] = 0
        unread = [slot for slot in range(1, SLOTS) if slot not in {read for _, read, _ in paths}]
        tails[unread] = states[unread] = np.nan
        return (
            normal(count, channels + 2 * value_heads),
            normal(channels, 1, TAPS),
            -np.exp(normal(value_heads)),
            normal(value_heads),
            padded_paths([rows for rows, _, _ in paths]),
            np.array([read for _, read, _ in paths], np.int32),
            np.array([write for _, _, write in paths], np.int32),
            tails,
            states,
        )

    used = sorted({row for rows, _, _ in paths for row in rows})
    written = sorted({write for _, _, write in paths} - {DISCARDED})
    return Case(
        name,
        make,
        attributes={"key_heads": key_heads},
        atol=3e-6,
        compare={"output": used, "tail_pool_out": written, "state_pool_out": written},
    )


CASES: tuple[Case, ...] = (
    delta("one row of a new sequence", ([0], 0, 1)),
    delta("one row after others", ([0], 2, 2)),
    delta("a prompt shorter than the convolution", ([0, 1], 0, 1)),
    delta("a prompt", (range(70), 0, 3)),
    delta("a ragged batch", (range(5), 1, 1), ([5], 2, 2), (range(6, 9), 0, 3)),
    delta(
        "a tree: four leaves, nothing is stored",
        *((rows, 1, DISCARDED) for rows in ([0, 1, 3], [0, 1, 4], [0, 2, 5, 6], [0, 2, 7])),
    ),
    delta("an accepted path, other rows are left out", ([0, 2, 6], 1, 1), ([8], 3, 3)),
    delta("a state is read from one slot and written to another", ([0, 1, 2, 3], 1, 4)),
    delta("three value heads a key head", (range(6), 1, 1), key_heads=1, value_heads=3),
    delta("values wider than keys", (range(4), 1, 2), key_width=16, value_width=24),
    delta("heads of 128", (range(5), 1, 1), value_heads=2, key_width=128, value_width=128),
)
