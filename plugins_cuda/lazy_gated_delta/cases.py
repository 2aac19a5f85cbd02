"""Named cases of LazyGatedDelta."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.tree_select.op import pack_bits

TAPS = 4
SLOTS = 5

# The parents of a sequence's nodes, root first; the number of rows before it; the accepted path.
Tree = tuple[Sequence[int], int, Sequence[int]]


def chain(nodes: int) -> list[int]:
    """Return the parents of a chain."""
    return list(range(-1, nodes - 1))


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Return which nodes [N, N] are a node itself or its ancestors."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen


def lazy(
    name: str,
    *trees: Tree,
    nodes: int | None = None,
    stores: bool = False,
    path: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    key_width: int = 16,
    value_width: int = 16,
    pad: int = 0,
) -> Case:
    """Return a batch of ``trees``. A sequence with 0 rows before it is padding, or a new prompt
    with ``stores``. Slots keep ``nodes`` rows.
    """
    channels = 2 * key_heads * key_width + value_heads * value_width
    values = value_heads * value_width
    kept = nodes or max(len(parents) for parents, _, _ in trees)
    words = -(-max(len(parents) for parents, _, _ in trees) // 32)
    slots = list(range(len(trees)))[::-1]
    live = [s for s, (parents, before, _) in zip(slots, trees, strict=True) if parents and before]

    def make(rng: np.random.Generator) -> Arrays:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        counts = [len(parents) for parents, _, _ in trees]
        width = channels + values + 2 * value_heads + pad
        tails = normal(SLOTS, TAPS - 1 + kept, channels)
        states = normal(SLOTS, value_heads, key_width, value_width)
        changes, keys = normal(SLOTS, kept, values), normal(SLOTS, kept, key_heads * key_width)
        decays = rng.uniform(0.1, 1, (SLOTS, kept, value_heads)).astype(np.float32)
        factors = np.concatenate([changes, keys * key_width**-0.5, decays], axis=2)
        unread = [slot for slot in range(SLOTS) if slot not in live]
        tails[unread] = states[unread] = factors[unread] = np.nan
        bits = np.zeros((sum(counts), words), np.int32)
        replay_path = np.full((len(trees), path), 10**6, np.int32)
        first = 0
        for b, (parents, _, accepted) in enumerate(trees):
            if not stores and parents:
                seen = torch.from_numpy(ancestors(parents))
                packed = pack_bits(seen).numpy()
                bits[first : first + len(parents), : packed.shape[1]] = packed
            replay_path[b, : len(accepted)] = accepted
            first += len(parents)
        positions = [before + i for parents, before, _ in trees for i in range(len(parents))]
        if not stores:
            positions = [before for parents, before, _ in trees for _ in parents]
        return (
            normal(sum(counts), width),
            normal(channels, 1, TAPS),
            -np.exp(normal(value_heads)),
            normal(value_heads),
            normal(value_width),
            np.array(positions, np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            bits,
            np.array(slots, np.int32),
            replay_path,
            np.array([len(accepted) for _, _, accepted in trees], np.int32),
            tails,
            states,
            factors,
        )

    written = [s for s, (parents, before, _) in zip(slots, trees, strict=True)
               if parents and (before or stores)]  # fmt: skip
    return Case(
        name,
        make,
        attributes={"key_heads": key_heads, "eps": 1e-6, "stores": int(stores)},
        kernel_atol=2e-2,
        kernel_rtol=3e-2,
        compare={f"{pool}_pool_out": written for pool in ("tail", "state", "factor")},
    )


CASES: tuple[Case, ...] = (
    lazy("one row, nothing to commit", (chain(1), 7, [])),
    lazy("one row after another", (chain(1), 7, [0])),
    lazy("one row after a chain", (chain(1), 7, [0, 1, 2]), nodes=4),
    lazy("one row after a path of a tree", (chain(1), 7, [0, 2, 5]), nodes=6),
    lazy("chains, a ragged commit", (chain(4), 5, [0]), (chain(4), 9, [0, 1, 2, 3]),
         (chain(4), 2, [])),
    lazy("chains beside padding", (chain(3), 5, [0, 1]), (chain(3), 0, [0]), (chain(3), 3, [0])),
    lazy("a tree", ([-1, 0, 0, 1, 1, 2, 5, 2], 5, [0, 2, 7]), path=4),
    lazy("trees of several words", ([-1, *(max(0, i - 3) for i in range(34))], 40, [0, 33]),
         ([-1, *(i // 2 for i in range(34))], 4, [0, 1, 3]), key_heads=1, value_heads=2),
    lazy("a prompt", (chain(40), 0, []), stores=True, nodes=3),
    lazy("prompts and a part of one", (chain(2), 0, []), (chain(19), 16, []), ([], 3, [0]),
         (chain(1), 0, []), stores=True, nodes=3),
    lazy("prompts of whole chunks and more", (chain(64), 0, []), (chain(130), 64, []),
         (chain(66), 5, [0]), stores=True, nodes=3),
    lazy("a part of a prompt behind a step", (chain(5), 9, [0, 1]), stores=True, nodes=3),
    lazy("three value heads a key head, values wider than keys", (chain(3), 5, [0, 1]),
         key_heads=1, value_heads=3, key_width=16, value_width=24, pad=2),
)  # fmt: skip

KERNEL_CASES: tuple[Case, ...] = (
    lazy("heads of 128", (chain(4), 5, [0, 1]), (chain(4), 5, [0, 1, 2, 3]), key_heads=1,
         value_heads=3, key_width=128, value_width=128),
    lazy("gpu: a layer of 27B", *((chain(4), 5, [0, 1]) for _ in range(5)), key_heads=16,
         value_heads=48, key_width=128, value_width=128),
    # More CTAs than run at once: each warms L2 for a later one.
    lazy("gpu: single rows of a layer of 397B", *((chain(1), 5, [0]) for _ in range(5)),
         nodes=4, key_heads=16, value_heads=64, key_width=128, value_width=128),
    lazy("gpu: a prompt of a layer of 27B", (chain(300), 0, []), (chain(77), 64, []), stores=True,
         nodes=4, key_heads=16, value_heads=48, key_width=128, value_width=128),
)  # fmt: skip
