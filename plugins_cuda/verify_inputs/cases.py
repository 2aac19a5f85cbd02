"""Named cases of VerifyInputs, with trees of TreeSelect."""

from __future__ import annotations

import numpy as np
import torch

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.extend_inputs.cases import draw_batch
from specbuild.plugins_cuda.tree_select.cases import select
from specbuild.plugins_cuda.tree_select.op import reference as select_reference


def draw_trees(
    rng: np.random.Generator, *, top_k: int, depth: int, nodes: int, batch: int, absent: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Return tokens, parents, depths, ancestor bits and counts of trees of ``nodes`` + 1 slots."""
    drawn = select(
        "", top_k=top_k, depth=depth, draft_tokens=nodes, batch=batch, step=0.5, absent=absent
    ).make(rng)
    tensors = [torch.from_numpy(array) for array in drawn if array is not None]
    return tuple(tensor.numpy() for tensor in select_reference(*tensors, depth=depth))


def draw_row_counts(rng: np.random.Generator, size: int, max_count: int, rows: int) -> np.ndarray:
    """Return ``size`` counts from 1 to ``max_count``, at most ``rows`` in total."""
    counts = rng.integers(1, max_count + 1, size).astype(np.int32)
    while counts.sum() > rows:
        counts[counts.argmax()] -= 1
    return counts


def verify(
    name: str,
    kinds: str,
    *,
    top_k: int = 3,
    depth: int = 3,
    nodes: int = 7,
    tree: bool = True,
    full: bool = True,
    sliding: bool = True,
    latent: bool = False,
    indexer: bool = False,
    floor: bool = True,
    absent: float = 0.0,
    page_size: int = 4,
    pages: int = 12,
    rows: int = 0,
) -> Case:
    """Limits are anywhere within the trees; a sliding group's table repeats its ring.

    With ``rows`` each sequence has a different number of rows, at most ``rows`` in total.
    """

    def make(rng: np.random.Generator) -> Arrays:
        batch = draw_batch(rng, kinds, pages=pages, page_size=page_size, ahead=min(nodes, 10))
        size = len(kinds)
        ring = batch.page_table[:, :3][:, np.arange(pages) % 3].copy()
        trees: tuple[np.ndarray | None, ...] = (None,) * 4
        if tree:
            drawn = draw_trees(
                rng, top_k=top_k, depth=depth, nodes=nodes, batch=size, absent=absent
            )
            trees = (drawn[0], *drawn[2:])
        return (
            *trees,
            batch.length,
            rng.integers(0, 1000, size).astype(np.int32),
            batch.done,
            batch.limit,
            rng.random(size).astype(np.float32),
            rng.integers(0, 50, size).astype(np.int32),
            rng.random(size).astype(np.float32),
            rng.integers(0, 2**31, size).astype(np.int32),
            batch.page_table if full else None,
            ring if sliding else None,
            batch.page_table[:, ::-1].copy() if latent else None,
            ring[:, ::-1].copy() if latent else None,
            np.roll(batch.page_table, 1, axis=1) if indexer else None,
            -rng.random(size).astype(np.float32) if floor else None,
            draw_row_counts(rng, size, nodes + 1, rows) if rows else None,
        )

    compare = {} if full else {"write_slot_full": np.s_[:0]}
    compare |= {} if sliding else {"write_slot_sliding": np.s_[:0]}
    absent_slots = ("write_slot_latent", "write_slot_latent_sliding")
    compare |= {} if latent else dict.fromkeys(absent_slots, np.s_[:0])
    compare |= {} if indexer else {"write_slot_indexer": np.s_[:0]}
    return Case(
        name,
        make,
        {"page_size": page_size, "rows": rows},
        atol=0,
        rtol=0,
        compare=compare,
        kernel_atol=0,
        kernel_rtol=0,
    )


CASES: tuple[Case, ...] = (
    verify("trees", "LLL"),
    verify("one sequence", "L", nodes=5),
    verify("chains", "LLLL", top_k=1, depth=8, nodes=8),
    verify("chains of different lengths", "LLLL", top_k=1, depth=6, nodes=6, absent=0.3),
    verify("done and padding", "DLDLPP"),
    verify("nothing lives", "DP", nodes=3),
    verify("absent candidates", "LLLL", nodes=15, absent=0.5),
    verify("32 slots", "LL", top_k=4, depth=6, nodes=31),
    verify("33 slots", "LD", top_k=4, depth=6, nodes=32),
    verify("past the page table", "LL", top_k=4, depth=4, nodes=12, pages=11, page_size=2),
    verify("one cache group", "LL", sliding=False),
    verify("no floor", "LDL", floor=False),
    verify("a count of rows for each sequence", "LLLL", top_k=1, depth=6, nodes=6, rows=16),
    verify("counts of rows and done sequences", "DLDLPP", rows=20),
)

KERNEL_CASES: tuple[Case, ...] = (
    verify("roots alone", "LLDL", nodes=0, tree=False),
    verify("latent groups too", "LPL", latent=True),
    verify("indexers too", "LPL", indexer=True),
    verify("roots alone, padding", "LPP", nodes=0, tree=False, full=False),
    verify("counts of rows, one sequence", "L", nodes=5, rows=3),
    verify("counts of rows and nothing lives", "DP", nodes=3, rows=8),
    verify("counts of rows of more sequences than a warp has lanes", "LLDL" * 17, rows=160),
    verify("counts of rows of trees of two words", "LLLD", top_k=4, depth=6, nodes=40, rows=100),
    verify("more rows than a block", "LLDLLLPP", top_k=8, depth=6, nodes=40),
    verify("more sequences than a warp has lanes", "LLDL" * 9),
    verify("gpu: batch 64", "LLLD" * 16, top_k=8, depth=8, nodes=60, page_size=64, pages=40),
)
