"""Named cases of ClusterLogits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw
from specbuild.plugins_cuda.rms_head.cases import chosen_rows


def clustered(
    name: str,
    *,
    clusters: int,
    read: int,
    tokens: int,
    width: int,
    rows: int = 1,
    logit_rows: Sequence[int] = (0,),
    levels: int | None = None,
    together: bool = False,
) -> Case:
    """Read ``read`` of ``clusters`` clusters of ``tokens`` tokens each.

    With ``levels`` the scores have only so many distinct values. ``together``: the tokens of a
    cluster are adjacent, so one CTA computes nearly all of them.
    """

    def make(rng: np.random.Generator) -> Arrays:
        x, selected = chosen_rows(rng, rows, width, logit_rows)
        vocab, shape = clusters * tokens, (len(logit_rows), clusters)
        scores = draw(rng, *shape)
        if levels is not None:
            scores = rng.integers(0, levels, shape).astype(np.float32)
        cluster_of = np.arange(vocab, dtype=np.int32) // tokens
        if not together:
            cluster_of = rng.permutation(cluster_of)
        weight = draw(rng, vocab, width, scale=width**-0.5)
        return scores, x, selected, weight, cluster_of

    attributes = {"read": read, "unread": -1e9}
    # Products of bf16 are exact in fp32, so only the order of sums differs.
    return Case(name, make, attributes, kernel_atol=1e-4, kernel_rtol=1e-4)


CASES: tuple[Case, ...] = (
    clustered("three of eight clusters", clusters=8, read=3, tokens=4, width=32),
    clustered(
        "rows of a launch", clusters=12, read=2, tokens=5, width=96, rows=7, logit_rows=(6, 2, 2)
    ),
    clustered("one cluster", clusters=16, read=1, tokens=3, width=64, rows=2, logit_rows=(1, 0)),
    clustered("all clusters", clusters=5, read=5, tokens=7, width=32, logit_rows=(0,)),
    clustered(
        "ties", clusters=40, read=9, tokens=2, width=32, rows=3, logit_rows=range(3), levels=3
    ),
    clustered("all scores equal", clusters=30, read=4, tokens=3, width=32, levels=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    clustered("several CTAs of tokens", clusters=128, read=32, tokens=37, width=256, rows=2,
              logit_rows=(1, 0)),
    clustered("the tokens of a cluster in one CTA", clusters=16, read=4, tokens=256, width=64,
              together=True),
    clustered("as many clusters as E4B", clusters=2048, read=32, tokens=2, width=32, rows=2,
              logit_rows=(0, 1)),
    clustered("ties of 2048 clusters", clusters=2048, read=64, tokens=1, width=32, levels=4),
    clustered("the most clusters, all equal", clusters=4096, read=64, tokens=1, width=32, levels=1),
    clustered("the widest rows", clusters=8, read=3, tokens=9, width=2048),
    clustered("a width of no complete piece", clusters=8, read=5, tokens=11, width=328),
    *(
        clustered(f"gpu: {rows} rows of Gemma 4 E4B", clusters=2048, read=32, tokens=128, width=256,
                  rows=rows, logit_rows=range(rows))
        for rows in (1, 8, 64)
    ),
)  # fmt: skip
