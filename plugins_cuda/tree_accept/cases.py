"""Named cases of TreeAccept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case


def random_tree(rng: np.random.Generator, *, count: int, depth: int) -> list[int]:
    """Return parents of ``count`` nodes, root first, at most ``depth`` levels deep."""
    parents, depths = [-1], [0]
    for _ in range(1, count):
        inner = [node for node, d in enumerate(depths) if d < depth]
        parents.append(int(rng.choice(inner)))
        depths.append(depths[parents[-1]] + 1)
    return parents


def accept(
    name: str,
    *,
    nodes: int,
    depth: int,
    counts: Sequence[int] | None = None,
    follow: float = 0.7,
    chain: bool = False,
    ragged: bool = False,
) -> Case:
    """Trees of ``counts`` slots, including the root, in buffers for ``nodes`` + 1.

    At each step of a walk the target's token equals that of a child with probability ``follow``.
    Unused slots are poisoned: they are below the root and match. If ``ragged``, there are rows for
    used slots only, none for every third sequence with a root alone, and two rows of padding.
    """
    used = counts if counts is not None else [nodes + 1, nodes + 1]

    def make(rng: np.random.Generator) -> Arrays:
        size = nodes + 1
        tokens = np.full((len(used), size), -1, np.int32)
        parents = np.full((len(used), size), -1, np.int32)
        ancestors = np.zeros((len(used), size, -(-size // 32)), np.uint32)
        choice = rng.integers(1000, 2000, (len(used), size)).astype(np.int32)
        for row, count in enumerate(used):
            tree = (
                list(range(-1, count - 1)) if chain else random_tree(rng, count=count, depth=depth)
            )
            parents[row, :count] = tree
            tokens[row, 1:count] = rng.permutation(1000)[: count - 1]
            for slot in range(size):
                if 0 < slot < count:
                    ancestors[row, slot] |= ancestors[row, tree[slot]]
                ancestors[row, slot, slot // 32] |= np.uint32(1 << (slot % 32))
            node = 0
            while rng.random() < follow:
                children = [i for i in range(1, count) if tree[i] == node]
                if not children:
                    break
                child = int(rng.choice(children))
                choice[row, node] = tokens[row, child]
                node = child
            parents[row, count:] = 0
            tokens[row, count:] = choice[row, 0]
            ancestors[row, count:, 0] |= np.uint32(1)
        inputs = (tokens, parents, ancestors.view(np.int32), np.array(used, np.int32))
        if not ragged:
            return *inputs, choice, None
        rows = [0 if count == 1 and b % 3 == 2 else count for b, count in enumerate(used)]
        of_slots = [choice[b, :count] for b, count in enumerate(rows)]
        choices = np.concatenate([*of_slots, rng.integers(0, 1000, 2).astype(np.int32)])
        return *inputs, choices[None], np.cumsum([0, *rows]).astype(np.int32)

    return Case(name, make, {"depth": depth})


CASES: tuple[Case, ...] = (
    accept("root alone", nodes=0, depth=3),
    accept("chain, all accepted", nodes=3, depth=3, chain=True, follow=1.0),
    accept("chain, none accepted", nodes=3, depth=3, chain=True, follow=0.0),
    accept("chain, some accepted", nodes=8, depth=8, chain=True, counts=[9, 9, 4, 1]),
    accept("small trees", nodes=10, depth=4, counts=[11, 11, 11, 11]),
    accept("trees of different sizes", nodes=12, depth=4, counts=[13, 1, 2, 7], follow=1.0),
    accept("depth beyond the nodes", nodes=2, depth=8, follow=1.0),
    accept("depth beyond one word", nodes=5, depth=40, chain=True, follow=1.0),
    accept("32 slots", nodes=31, depth=6, follow=1.0),
    accept("33 slots", nodes=32, depth=32, chain=True, follow=1.0),
    accept("two words", nodes=60, depth=8, counts=[61, 40, 61], follow=0.9),
)

KERNEL_CASES: tuple[Case, ...] = (
    accept("rows of chains", nodes=8, depth=8, chain=True, counts=[9, 4, 1, 2, 6], follow=0.9,
           ragged=True),
    accept("rows of trees", nodes=40, depth=8, counts=[41, 7, 1, 1, 12, 1], follow=0.9,
           ragged=True),
    accept("gpu: batch 64", nodes=60, depth=8, counts=[61] * 64, follow=0.9),
)  # fmt: skip
