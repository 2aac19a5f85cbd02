"""Named cases of Advance."""

from __future__ import annotations

import numpy as np
import torch

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.extend_inputs.cases import draw_batch
from specbuild.plugins_cuda.tree_accept.cases import accept
from specbuild.plugins_cuda.tree_accept.op import reference as accept_reference
from specbuild.runtime.engine_dir.plan import ADJUSTS

RING = 4
# Tokens are below this.
MARKED_VOCAB = 2000


def advance(
    name: str,
    kinds: str,
    *,
    nodes: int = 6,
    depth: int = 4,
    deepest: int = 5,
    chain: bool = False,
    follow: float = 0.8,
    eos: int = 0,
    draft: bool = True,
    tree: bool = True,
    extended: bool = True,
    width: int = 16,
    step: int = 9,
    budget: int = 12,
    ends_from: int = 0,
    waiting: int | None = None,
    marked: bool = True,
    ragged: bool = False,
) -> Case:
    """``eos`` choices on the paths end a sequence, from node ``ends_from`` of them on.

    The limit may end a sequence earlier. ``deepest`` is the depth of the engine: it sizes the ring
    and, unless ``waiting`` does, the pending rows. ``marked``: the tokens of two of three sequences
    are counted. If ``ragged``, a sequence has a row for each slot of its path, or none if it is
    done, and there are two rows of padding.
    """

    def make(rng: np.random.Generator) -> Arrays:
        batch = draw_batch(rng, kinds, pages=9, page_size=4, ahead=6, budget=budget)
        size, slots, capacity = len(kinds), nodes + 1 if tree else 1, deepest + 1
        choice = rng.integers(0, 1000, (size, slots)).astype(np.int32)
        path = accepted = None
        if tree:
            drawn = accept(
                "",
                nodes=nodes,
                depth=depth,
                counts=[slots] * size,
                follow=follow,
                chain=chain,
            ).make(rng)
            tensors = [torch.from_numpy(array) for array in drawn if array is not None]
            choice = tensors[-1].numpy()
            path, accepted, _ = (t.numpy() for t in accept_reference(*tensors, depth=depth))
        row_start = None
        if ragged and accepted is not None:
            choice, row_start = _in_rows(rng, choice, np.where(batch.done != 0, 0, 1 + accepted))
        ring = (RING, size + 2, capacity)

        def ints(*shape: int) -> np.ndarray:
            return rng.integers(0, 1000, shape).astype(np.int32)

        def floats(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        on_paths = choice if ragged else _choices_of(choice, path, ends_from)
        ends = rng.permutation(np.unique(on_paths))[:eos].astype(np.int32)
        held = waiting or capacity
        pending = rng.integers(1, held + 1, size).astype(np.int32)
        return (
            choice.reshape(-1),
            floats(choice.size),
            path,
            accepted,
            floats(choice.size, width) if draft else None,
            batch.length,
            ints(size),
            pending if draft else None,
            ints(size, held) if draft else None,
            floats(size, held, width) if draft else None,
            batch.done,
            batch.limit,
            rng.integers(0, 2, size).astype(np.int32),
            np.pad(ends, (0, 8 - len(ends)), constant_values=-1),
            np.array([step], np.int32),
            ints(*ring),
            floats(*ring),
            ints(*ring[:2]),
            ints(*ring[:2]),
            ints(RING),
            *(_marks(rng, size) if marked else (None, None)),
            row_start,
        )

    return Case(
        name, make, {"extended": int(extended)}, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0
    )


def _choices_of(choice: np.ndarray, path: np.ndarray | None, first: int) -> np.ndarray:
    """Return the choices at the roots, or at the nodes of paths from node ``first`` on."""
    return choice[:, 0] if path is None else choice[:, path.max(axis=0).clip(0)[first:]].ravel()


def _in_rows(
    rng: np.random.Generator, choice: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first ``counts[b]`` choices of each sequence, two of padding, ``row_start``."""
    of_slots = choice[np.arange(choice.shape[1]) < counts[:, None]]
    padding = rng.integers(0, 1000, 2).astype(np.int32)
    return np.concatenate([of_slots, padding]), np.cumsum([0, *counts]).astype(np.int32)


def _marks(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``changes``, by which two of three sequences are counted, and ``marks``."""
    changes = np.array([ADJUSTS * (b % 3 < 2) for b in range(size)], np.int32)
    return changes, rng.integers(0, 1000, (size, MARKED_VOCAB)).astype(np.int32)


CASES: tuple[Case, ...] = (
    advance("trees", "LLLL"),
    advance("one sequence", "L", follow=1.0),
    advance("nothing accepted", "LLL", follow=0.0),
    advance("chains, all accepted", "LLLL", chain=True, nodes=4, follow=1.0),
    advance("an end of sequence", "LLLLLLLL", eos=4, follow=1.0),
    advance("done and padding", "DLDLPP", eos=1),
    advance("nothing lives", "DP"),
    advance("first step", "LL", step=0),
    advance("the draft did not run", "LLLL", extended=False),
    advance("the draft did not run, long paths", "LLLL", extended=False, chain=True, nodes=5,
            depth=5, follow=1.0),
    advance("a step without a draft", "LLDL", tree=False, extended=False),
    advance("the draft ran, without a tree", "LLDL", tree=False),
    advance("one row longer than the last thread", "LL", width=24),
    advance("more than can wait for the draft", "LLDL", chain=True, nodes=9, depth=9, deepest=9,
            follow=0.9, budget=20, waiting=3),
)  # fmt: skip

KERNEL_CASES: tuple[Case, ...] = (
    advance("rows of chains", "LLDLPP", chain=True, depth=6, deepest=6, ragged=True),
    advance("rows of chains, an end of sequence", "LDLL", chain=True, depth=6, deepest=6, eos=2,
            ragged=True),
    advance("paths beyond a warp", "LLLL", nodes=40, depth=40, deepest=40, chain=True, follow=1.0,
            budget=60),
    advance("a late end of sequence", "LLLLLL", nodes=40, depth=40, deepest=42, chain=True,
            follow=1.0, budget=60, eos=8, extended=False),
    advance("an end beyond a warp", "LLLLLL", nodes=40, depth=40, deepest=42, chain=True,
            follow=1.0, budget=60, eos=8, ends_from=33),
    advance("more sequences than warps", "LLDL" * 9, width=8, nodes=2, depth=2),
    advance("gpu: batch 64", "LLLD" * 16, nodes=60, depth=8, deepest=8, width=8640),
    advance("gpu: the draft did not run", "LLLD" * 4, nodes=2, depth=2, width=8640,
            extended=False),
)  # fmt: skip

# Outputs of absent inputs are absent.
PLAIN_CASES: tuple[Case, ...] = (
    advance("without a draft", "LLDL", draft=False, tree=False),
    advance("without a draft, an end of sequence", "LLLLP", draft=False, tree=False, eos=3),
    advance("without a draft and marks", "LLDL", draft=False, tree=False, marked=False),
)
