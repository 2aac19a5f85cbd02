"""Named cases of ViewInputs: sequences in full steps, with views, and done ones."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

PAGE_SIZE, BLOCK, SINK, WINDOW, BUFFER = 2, 4, 4, 1, 8


def views(
    name: str,
    kinds: str,
    *,
    nodes: int = 3,
    room: int = 0,
    words: int = 1,
    threshold: int = 20,
    sliding: bool = True,
) -> Case:
    """One sequence per letter: F full, f full but short, V with a view, W whole, D done.

    F has 3 buffered tokens, V up to 5.
    """

    def make(rng: np.random.Generator) -> Arrays:
        batch, pages = len(kinds), 40
        rows = batch * nodes
        start = np.array([rng.integers(24, 60) for _ in kinds])
        start[[k == "f" for k in kinds]] = 9
        start[[k == "D" for k in kinds]] = 0
        depth = np.sort(rng.integers(1, 4, (batch, nodes)), axis=1)
        depth[:, 0] = 0
        buffered = np.array([{"F": 3, "f": 1, "V": int(rng.integers(6))}.get(k, 0) for k in kinds])
        blocks = [int(rng.integers(2, 5)) if k in "FV" else -1 for k in kinds]
        tables = rng.integers(1, 500, (2, batch, pages)).astype(np.int32)
        return (
            rng.integers(1, 900, rows).astype(np.int32),
            (start[:, None] + depth).reshape(-1).astype(np.int32),
            rng.integers(0, 2**31, (rows, words)).astype(np.int32),
            rng.integers(10, 99, rows).astype(np.int32),
            rng.integers(10, 99, rows).astype(np.int32) if sliding else None,
            rng.integers(1, nodes + 1, batch).astype(np.int32),
            np.array([k == "D" for k in kinds], np.int32),
            np.array([k in "Ff" for k in kinds], np.int32),
            (start - buffered).astype(np.int32),
            np.array(blocks, np.int32),
            rng.integers(1, 4, batch).astype(np.int32),
            rng.integers(1, 900, (batch, BUFFER)).astype(np.int32),
            tables[0],
            tables[1] if sliding else None,
        )

    attributes = {
        "page_size": PAGE_SIZE,
        "block_size": BLOCK,
        "sink_tokens": SINK,
        "window_blocks": WINDOW,
        "threshold": threshold,
        "room": room,
    }
    compare = {} if sliding else {"row_write_sliding": np.s_[:0]}
    return Case(
        name, make, attributes, atol=0, rtol=0, compare=compare, kernel_atol=0, kernel_rtol=0
    )


CASES: tuple[Case, ...] = (
    views("a view", "V"),
    views("full, with what is re-verified", "F", room=3),
    views("full and viewed", "VFVF", room=8),
    views("no room for the second", "FVF", room=4),
    views("full without room", "FV"),
    views("below the threshold", "fV", room=2),
    views("whole, and done ones between", "WDVDFDD", room=5),
    views("nothing lives", "DD", room=4),
    views("roots alone", "VFW", nodes=1, room=3),
    views("full attention alone", "FV", room=3, sliding=False),
)

KERNEL_CASES: tuple[Case, ...] = (
    views("more rows than a block", "VFVFVFWD" * 2, nodes=12, room=30, words=2),
)
