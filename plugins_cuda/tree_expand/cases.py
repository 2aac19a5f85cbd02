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
    temperatures: tuple[float, ...] | None = None,
    identity: bool = False,
    offset: int = 0,
    per_node: int = 0,
    fixed: float | None = None,
    read: float | None = None,
) -> Case:
    """One level; ``certain`` gives every row a token with probability 1 up to rounding.

    With ``levels`` the logits have only so many distinct values. With ``temperatures``, one per
    sequence, the logits have noise. ``identity``: the draft has the target's vocabulary. A share
    ``fixed`` of the children has scores of a form, half of which are absent ones. Only a share
    ``read`` of the tokens has logits; those of the others are very low (ClusterLogits).
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
        if read is not None:
            unread = np.float32(-1e9) - 64 * np.arange(vocab, dtype=np.float32)
            logits = np.where(rng.random(logits.shape) < read, logits, unread)
        offsets = np.sort(rng.choice(4 * vocab, vocab, replace=False)) - np.arange(vocab)
        if identity:
            offsets = np.zeros_like(offsets)
        arrays = logits, score, offsets.astype(np.int32), np.array(top_k, np.int32)
        form = None
        if fixed is not None:
            form = np.where(
                rng.random(frontier * top_k) < fixed, -rng.integers(1, 4, frontier * top_k), 0
            )
            form = np.where((form < 0) & (rng.random(len(form)) < 0.5), -1e30, form)
            form = form.astype(np.float32)
        if temperatures is None:
            return *arrays, None, None, None, form
        seed, position = rng.integers(0, 2**31, (2, batch)).astype(np.int32)
        return *arrays, np.array(temperatures, np.float32), seed, position % 100_000, form

    attributes = {"offset": offset, "per_node": per_node} if temperatures else {}
    return Case(name, make, attributes=attributes, kernel_atol=1e-5, kernel_rtol=1e-5)


CASES: tuple[Case, ...] = (
    expand("chain"),
    expand("chain, one sequence", batch=1, top_k=1),
    expand("first level", top_k=4),
    expand("later level", frontier=4, top_k=4, batch=3),
    expand("ties", frontier=3, top_k=3, digits=0),
    expand("the whole vocabulary", vocab=5, top_k=5),
    expand("a certain token", frontier=3, certain=True),
    expand("a fixed form", frontier=4, top_k=4, batch=3, fixed=1.0),
    expand("a form for some children, sampled", frontier=3, fixed=0.5, temperatures=(0.7, 0.0)),
    expand("wide", frontier=8, top_k=8, vocab=500),
    expand("sampled and greedy", batch=3, top_k=1, vocab=96, temperatures=(0.7, 0.0, 1.3)),
    expand("sampled level", frontier=4, top_k=4, vocab=90, temperatures=(1.0, 0.5), offset=2),
    expand("sampled levels of one pass", frontier=5, top_k=2, temperatures=(0.8, 1.0), per_node=1),
    expand("sampled, no draft vocabulary", vocab=64, temperatures=(1.0, 0.9), identity=True),
)

KERNEL_CASES: tuple[Case, ...] = (
    expand("a vocabulary of no whole vectors", frontier=4, top_k=4, vocab=2051),
    expand("more than a thread holds", batch=1, frontier=2, top_k=2, vocab=33_000),
    expand("thousands of equal logits", frontier=2, top_k=5, vocab=6_000, levels=2),
    expand("equal logits beyond what a thread holds", batch=1, top_k=3, vocab=38_000, levels=2),
    expand(
        "sampled, a vocabulary of no whole vectors",
        frontier=2,
        top_k=4,
        vocab=2051,
        temperatures=(1.0, 0.6),
        per_node=1,
    ),
    expand(
        "sampled, more than a thread holds",
        batch=1,
        frontier=2,
        top_k=2,
        vocab=33_000,
        temperatures=(0.8,),
        identity=True,
    ),
    expand("logits of few tokens", batch=1, frontier=2, top_k=4, vocab=6_000, read=0.001),
    expand("16 nodes of 16 children", batch=1, frontier=16, top_k=16, vocab=3_072),
    expand("gpu: the vocabulary of a draft", batch=64, frontier=4, top_k=4, vocab=32_000),
    expand("gpu: a chain", batch=1, top_k=1, vocab=32_000),
    expand("gpu: the vocabulary of the target", batch=2, frontier=8, top_k=8, vocab=201_088),
)
