"""Named cases of TreeSelect, with the pools of a dynamic draft tree."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def candidate_pool(
    rng: np.random.Generator, *, top_k: int, depth: int, step: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, scores and parents [M], M = K + (D − 1)·K², by level, K children per node.

    Scores fall by multiples of ``step``, which have many ties, or by arbitrary amounts if it is 0.
    """

    def losses(count: int) -> np.ndarray:
        fall = rng.exponential(1.0, count)
        return fall if step == 0 else step * np.floor(fall / step)

    def tokens(parents: int) -> np.ndarray:
        return np.concatenate([rng.permutation(50)[:top_k] for _ in range(parents)])

    scores, parents, ids = list(-losses(top_k)), [-1] * top_k, [tokens(1)]
    frontier = list(range(top_k))
    for _ in range(depth - 1):
        first = len(scores)
        for node in frontier:
            scores += list(scores[node] - losses(top_k))
            parents += [node] * top_k
        ids.append(tokens(top_k))
        level = np.array(scores[first:])
        frontier = [first + int(i) for i in np.argsort(-level, kind="stable")[:top_k]]
    return (
        np.concatenate(ids).astype(np.int32),
        np.array(scores, np.float32),
        np.array(parents, np.int32),
    )


def select(
    name: str,
    *,
    top_k: int,
    depth: int,
    draft_tokens: int,
    batch: int = 2,
    step: float = 0.0,
    absent: float = 0.0,
) -> Case:
    """A pool per sequence, in which a share ``absent`` of the leaves is missing (score −inf)."""

    def make(rng: np.random.Generator) -> Arrays:
        pools = [candidate_pool(rng, top_k=top_k, depth=depth, step=step) for _ in range(batch)]
        tokens, scores, parents = (np.stack(part) for part in zip(*pools, strict=True))
        lost = rng.random(scores.shape) < absent
        for row in range(batch):
            for node in range(scores.shape[1]):
                above = parents[row, node]
                lost[row, node] |= above >= 0 and lost[row, above]
        scores[lost] = -np.inf
        return tokens, scores, parents, np.array(draft_tokens, np.int32)

    return Case(name, make, {"depth": depth})


CASES: tuple[Case, ...] = (
    select("chain of 1", top_k=1, depth=1, draft_tokens=1),
    select("chain of 3", top_k=1, depth=3, draft_tokens=3, batch=1),
    select("chain of 8, 5 kept", top_k=1, depth=8, draft_tokens=5),
    select("one level", top_k=4, depth=1, draft_tokens=4),
    select("small tree", top_k=3, depth=3, draft_tokens=7),
    select("ties", top_k=3, depth=4, draft_tokens=12, step=1.0),
    select("all scores equal", top_k=3, depth=3, draft_tokens=9, step=100.0),
    select("every candidate", top_k=2, depth=3, draft_tokens=10),
    select("absent candidates", top_k=3, depth=3, draft_tokens=15, absent=0.3),
    select("fewer candidates than top_k", top_k=2, depth=3, draft_tokens=10, absent=0.7),
    select("no candidate at all", top_k=2, depth=2, draft_tokens=4, absent=1.0),
    select("31 nodes and the root", top_k=4, depth=6, draft_tokens=31),
    select("32 nodes and the root", top_k=4, depth=6, draft_tokens=32),
    select("60 of 456", top_k=8, depth=8, draft_tokens=60, batch=3),
    select("64 nodes and the root", top_k=6, depth=5, draft_tokens=64),
    select("deeper than 64", top_k=1, depth=70, draft_tokens=70, batch=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    select("more candidates than threads", top_k=14, depth=8, draft_tokens=60),
    select("ties of more candidates than threads", top_k=14, depth=8, draft_tokens=90, step=1.0),
    select("gpu: batch 64", top_k=8, depth=8, draft_tokens=60, batch=64),
)
