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
) -> Case:
    """One level; ``certain`` gives every row a token of probability 1 within rounding."""

    def make(rng: np.random.Generator) -> Arrays:
        logits = (rng.standard_normal((batch * frontier, vocab)) * 3).astype(np.float32)
        score = -np.abs(rng.standard_normal((batch, frontier))).astype(np.float32)
        if digits is not None:
            logits, score = np.round(logits, digits), np.round(score, digits)
        if certain:
            logits[:, 5] = 60.0
        offsets = np.sort(rng.choice(4 * vocab, vocab, replace=False)) - np.arange(vocab)
        return logits, score, offsets.astype(np.int32), np.array(top_k, np.int32)

    return Case(name, make)


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
