"""Named cases of TreeExpand."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def expand(
    name: str,
    *,
    batch: int = 2,
    frontier: int = 1,
    top_k: int = 3,
    vocab: int = 24,
    digits: int | None = None,
    certain: bool = False,
    levels: int | None = None,
) -> Case:
    """One level; ``certain`` gives every row a token of probability 1 within rounding.

    With ``levels`` the logits take so many values only.
    """

    def make(rng: np.random.Generator) -> Arrays:
        logits = (rng.standard_normal((batch * frontier, vocab)) * 3).astype(np.float32)
        score = -np.abs(rng.standard_normal((batch, frontier))).astype(np.float32)
        if digits is not None:
            logits, score = np.round(logits, digits), np.round(score, digits)
        if levels is not None:
            logits = rng.integers(0, levels, logits.shape).astype(np.float32)
        if certain:
            logits[:, 5] = 60.0
        offsets = np.sort(rng.choice(4 * vocab, vocab, replace=False)) - np.arange(vocab)
        return logits, score, offsets.astype(np.int32), np.array(top_k, np.int32)

    return Case(name, make, kernel_atol=1e-5, kernel_rtol=1e-5)


CASES: tuple[Case, ...] = (
    expand("chain"),
    expand("chain, one sequence", batch=1, top_k=1),
    expand("first level", top_k=4),
    expand("later level", frontier=4, top_k=4, batch=3),
    expand("ties", frontier=3, top_k=3, digits=0),
    expand("the whole vocabulary", vocab=5, top_k=5),
    expand("a certain token", frontier=3, certain=True),
    expand("wide", frontier=8, top_k=8, vocab=500),
)

KERNEL_CASES: tuple[Case, ...] = (
    expand("a vocabulary of no whole vectors", frontier=4, top_k=4, vocab=2051),
    expand("more than a thread holds", batch=1, frontier=2, top_k=2, vocab=33_000),
    expand("thousands of equal logits", frontier=2, top_k=5, vocab=6_000, levels=2),
    expand("equal logits beyond what a thread holds", batch=1, top_k=3, vocab=38_000, levels=2),
    expand("16 nodes of 16 children", batch=1, frontier=16, top_k=16, vocab=3_072),
    expand("gpu: the vocabulary of a draft", batch=64, frontier=4, top_k=4, vocab=32_000),
    expand("gpu: a chain", batch=1, top_k=1, vocab=32_000),
    expand("gpu: the vocabulary of the target", batch=2, frontier=8, top_k=8, vocab=201_088),
)
