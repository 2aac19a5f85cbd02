"""Named cases of AdjustLogits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.tree_accept.cases import random_tree
from specbuild.runtime.engine_dir.plan import (
    ADJUSTS,
    ENDS_OUTPUT,
    FORCED_ROWS,
    IN_PROMPT,
    MASKED_ROW,
)

_OF_KIND = {
    "-": 0,
    "a": ADJUSTS,
    "m": MASKED_ROW,
    "b": ADJUSTS | MASKED_ROW,
    "f": FORCED_ROWS | MASKED_ROW,
    "g": ADJUSTS | FORCED_ROWS,
}


def adjust(
    name: str,
    kinds: str,
    *,
    nodes: int = 1,
    forced: int = 0,
    vocab: int = 70,
    counts: bool = True,
    penalised: bool = True,
    row_counts: Sequence[int] = (),
) -> Case:
    """One sequence per character of ``kinds``.

    ``-`` changes nothing, ``a`` adjusts, ``m`` is masked, ``b`` both, ``f`` has ``forced`` forced
    rows and a masked one, ``g`` adjusts and forces. Each is a tree of ``nodes`` slots. ``counts``:
    the tokens of paths are counted. With ``row_counts`` each sequence has so many rows of its tree,
    and two rows of padding follow.
    """
    row_counts = row_counts or [nodes] * len(kinds)
    slots = [(kind, slot) for kind, n in zip(kinds, row_counts, strict=True) for slot in range(n)]
    padding = 2 if row_counts else 0

    def make(rng: np.random.Generator) -> Arrays:
        sequences = len(kinds)
        rows = len(slots) + padding
        marks = rng.integers(-5, 4, (sequences, vocab)).clip(0)
        marks += rng.integers(0, 2, marks.shape) * IN_PROMPT
        marks += (rng.integers(0, 9, marks.shape) == 0) * ENDS_OUTPUT
        bias = rng.uniform(-100, 100, marks.shape) * rng.integers(0, 2, marks.shape)
        without = np.array([1.0, 0.0, 0.0])[:, None].repeat(sequences, axis=1)
        drawn = np.stack([rng.uniform(0.3, 3, sequences), *rng.uniform(-2, 2, (2, sequences))])
        penalties = drawn if penalised else without
        words = -(-vocab // 32)
        # Few different tokens, so that a path has some of them several times.
        row_tokens = rng.choice(rng.integers(0, vocab, 3), rows).astype(np.int32)
        return (
            (rng.standard_normal((rows, vocab)) * 3).astype(np.float32),
            row_tokens if counts else None,
            _ancestors(rng, row_counts, nodes, padding) if counts else None,
            rng.integers(0, 40, rows).astype(np.int32),
            np.array([_OF_KIND[kind] for kind in kinds], np.int32),
            np.full(sequences, forced, np.int32),
            rng.integers(0, 40, sequences).astype(np.int32),
            *penalties.astype(np.float32),
            bias.astype(np.float32),
            rng.integers(-(2**31), 2**31, (sequences, words)).astype(np.int32),
            marks.astype(np.int32),
            np.cumsum([0, *row_counts]).astype(np.int32) if row_counts else None,
        )

    changed = [r for r, (kind, slot) in enumerate(slots) if _changes(kind, slot, forced)]
    compare = {"raw": np.array(changed, int)}
    return Case(name, make, compare=compare, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


def _changes(kind: str, slot: int, forced: int) -> bool:
    """Return whether the row of a slot changes; without forced rows, the root is masked."""
    by_guide = {"m": slot == 0, "f": slot <= forced}
    return kind in "abg" or by_guide.get(kind, False)


def _ancestors(
    rng: np.random.Generator, row_counts: Sequence[int], nodes: int, padding: int
) -> np.ndarray:
    """Return the packed bits of random trees: each slot and its ancestors."""
    bits = np.zeros((len(row_counts), nodes, -(-nodes // 32)), np.uint32)
    for b in range(len(row_counts)):
        parents = random_tree(rng, count=nodes, depth=nodes)
        for slot, parent in enumerate(parents):
            if slot:
                bits[b, slot] |= bits[b, parent]
            bits[b, slot, slot // 32] |= np.uint32(1 << slot % 32)
    sequence_bits = [bits[b, :count] for b, count in enumerate(row_counts)]
    return np.concatenate([*sequence_bits, bits[0, :1].repeat(padding, axis=0)]).view(np.int32)


CASES: tuple[Case, ...] = (
    adjust("no changes", "--"),
    adjust("adjusted rows", "aaaaaa"),
    adjust("adjusted, nothing to count", "aaaa", counts=False),
    adjust("without penalties", "ab", penalised=False),
    adjust("masked rows", "mm-m"),
    adjust("every kind of row", "-amb", vocab=37),
    adjust("trees", "-amba", nodes=6, vocab=41),
    adjust("trees of several words of bits", "a-b", nodes=67),
    adjust("chains with forced rows", "f-gmfab", nodes=5, forced=3),
    adjust("a vocabulary of one", "ab", vocab=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    adjust("rows of a tree", "f-gmfab", nodes=5, forced=2, row_counts=[3, 1, 5, 2, 3, 0, 4]),
    adjust("rows of a tree, more sequences than lanes", "ab-m" * 9, nodes=2,
           row_counts=[2, 1, 1, 2] * 9),
    adjust("more tokens than a block has", "-amb", vocab=4099),
    adjust("trees, more tokens than a block has", "a-mb", nodes=5, vocab=2051),
    adjust("forced rows, more tokens than a block has", "fg-m", nodes=3, forced=2, vocab=2051),
    adjust("gpu: the vocabulary of GPT-OSS", "-ambb" * 3, nodes=4, vocab=201_088),
)  # fmt: skip
