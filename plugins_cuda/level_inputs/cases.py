"""Named cases of LevelInputs."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.extend_inputs.cases import FAR_TOKEN, draw_batch

_ROWS = (
    "token_ids",
    "hidden_rows",
    "positions",
    "row_start",
    "row_slot",
    "write_slot",
    "tree_start",
    "ancestor_bits",
    "logit_rows",
    "score",
)


def level_case(
    name: str,
    kinds: str,
    *,
    top_k: int,
    depth: int,
    level: int,
    last: bool = False,
    width: int = 16,
    page_size: int = 4,
    pages: int = 12,
) -> Case:
    """TreeExpand's outputs at this level, with a parent row anywhere in the extension."""

    def make(rng: np.random.Generator) -> Arrays:
        ahead = min(top_k * depth, 12)
        batch = draw_batch(rng, kinds, pages=pages, page_size=page_size, ahead=ahead)
        size, nodes = len(kinds), 1 if level == 1 else top_k
        tokens = rng.integers(0, 1000, (size, nodes * top_k)).astype(np.int32)
        scores = -rng.random((size, nodes * top_k)).astype(np.float32)
        frontier = np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        rows = 3 * size if level == 1 else size * top_k
        hidden = rng.standard_normal((rows, width)).astype(np.float32)
        parent_rows = rng.integers(0, rows, size).astype(np.int32) if level == 1 else None
        words = max(1, -(-top_k * (depth - 1) // 32))
        bits = rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
        pool = top_k + (depth - 1) * top_k**2
        held = (top_k + (level - 2) * top_k**2) if level > 1 else 0
        frontier_pool = rng.integers(0, held, (size, top_k)) if level > 1 else FAR_TOKEN
        return (
            tokens,
            scores,
            frontier,
            hidden,
            parent_rows,
            None if level == 1 else bits,
            batch.length,
            batch.done,
            batch.limit,
            batch.page_table,
            rng.integers(0, 1000, (size, pool)).astype(np.int32),
            -rng.random((size, pool)).astype(np.float32),
            rng.integers(-1, pool, (size, pool)).astype(np.int32),
            np.full((size, top_k), frontier_pool, np.int32),
        )

    attributes = {"level": level, "depth": depth, "page_size": page_size, "last": int(last)}
    compare = {output: np.s_[:0] for output in _ROWS} if last else {}
    return Case(
        name, make, attributes, atol=0, rtol=0, compare=compare, kernel_atol=0, kernel_rtol=0
    )


CASES: tuple[Case, ...] = (
    level_case("first level", "LLL", top_k=3, depth=3, level=1),
    level_case("second level", "LL", top_k=3, depth=3, level=2),
    level_case("chain, first level", "LLL", top_k=1, depth=4, level=1),
    level_case("chain, third level", "LLL", top_k=1, depth=4, level=3),
    level_case("one level in all", "LL", top_k=4, depth=1, level=1, last=True),
    level_case("last level", "LDL", top_k=3, depth=4, level=4, last=True),
    level_case("done and padding", "DLDLPP", top_k=2, depth=4, level=2),
    level_case("nothing lives", "DP", top_k=2, depth=3, level=1),
    level_case("past the page table", "LL", top_k=4, depth=6, level=5, pages=14, page_size=2),
    level_case("bit 31 and two words", "LL", top_k=8, depth=6, level=4),
    level_case("first slot of a later word", "LP", top_k=8, depth=7, level=5, width=40),
)

KERNEL_CASES: tuple[Case, ...] = (
    level_case("many candidates", "LLPP", top_k=16, depth=8, level=7, width=8),
    level_case("gpu: batch 64", "LLLD" * 16, top_k=8, depth=8, level=6, width=2880, page_size=64),
)
