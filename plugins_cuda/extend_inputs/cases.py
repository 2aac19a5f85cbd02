"""Named cases of ExtendInputs, and the batches of the cases of all step ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case

FAR_TOKEN = 10**8


@dataclass(frozen=True)
class Batch:
    """The state of sequences, int32 [B]; ``page_table`` [B, P]."""

    length: np.ndarray
    done: np.ndarray
    limit: np.ndarray
    page_table: np.ndarray


def draw_batch(
    rng: np.random.Generator,
    kinds: str,
    *,
    pages: int,
    page_size: int,
    ahead: int,
    budget: int = 12,
) -> Batch:
    """Return one sequence per letter: L is live, D is done and still has its pages, P is padding.

    ``ahead`` slots past the length are within the page table. Each sequence may emit up to
    ``budget`` more tokens.
    """
    batch = len(kinds)
    length = rng.integers(ahead, pages * page_size - ahead, batch).astype(np.int32)
    limit = length + rng.integers(2, budget + 2, batch).astype(np.int32)
    table = 1 + rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    padding = np.array([kind == "P" for kind in kinds])
    length[padding], limit[padding], table[padding] = 0, 0, 0
    return Batch(length, np.array([kind != "L" for kind in kinds], np.int32), limit, table)


def extend(
    name: str,
    kinds: str,
    counts: list[int],
    *,
    capacity: int,
    width: int = 16,
    page_size: int = 4,
    masks: int = 0,
) -> Case:
    """Sequences with ``counts`` of ``capacity`` pending rows; other rows are poisoned."""

    def make(rng: np.random.Generator) -> Arrays:
        ahead = max(capacity, masks)
        batch = draw_batch(rng, kinds, pages=6, page_size=page_size, ahead=ahead)
        captured = rng.standard_normal((len(kinds), capacity, width)).astype(np.float32)
        tokens = rng.integers(0, 1000, (len(kinds), capacity)).astype(np.int32)
        for b, count in enumerate(counts):
            captured[b, count:], tokens[b, count:] = np.nan, FAR_TOKEN
        pending = np.array(counts, np.int32)
        state = batch.length, batch.done, pending, tokens, captured, batch.page_table
        mask = rng.standard_normal(width).astype(np.float32)
        return *state, mask if masks else None

    attributes = {"page_size": page_size}
    if masks:
        attributes |= {"masks": masks, "mask_token": 77}
    return Case(name, make, attributes, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    extend("one sequence", "L", [2], capacity=3),
    extend("one row each", "LLL", [1, 1, 1], capacity=1),
    extend("ragged", "LLLL", [3, 1, 4, 2], capacity=4),
    extend("full", "LL", [4, 4], capacity=4, width=24),
    extend("a done sequence in between", "LDL", [2, 3, 1], capacity=3),
    extend("padding at the end", "LLPP", [1, 3, 0, 0], capacity=3, page_size=16),
    extend("nothing lives", "DP", [2, 0], capacity=2),
    extend("a mask row", "L", [2], capacity=3, masks=1),
    extend("mask rows of ragged sequences", "LDLLP", [3, 2, 1, 4, 0], capacity=4, masks=6),
    extend("many sequences", "LDLL" * 10, [1, 2, 2, 1] * 10, capacity=2, width=8),
)

KERNEL_CASES: tuple[Case, ...] = (
    extend("more sequences than threads", "LLDP" * 33, [1, 2, 2, 0] * 33, capacity=2, width=8),
    extend("more mask rows than threads", "LDL" * 30, [1, 2, 2] * 30, capacity=2, width=8, masks=3),
    extend(
        "gpu: mask rows",
        "LLLD" * 4,
        [1, 8, 3, 2] * 4,
        capacity=8,
        width=8640,
        masks=6,
        page_size=16,
    ),
    extend("gpu: batch 64", "LLLD" * 16, [1, 5, 3, 2] * 16, capacity=5, width=8640, page_size=16),
)
