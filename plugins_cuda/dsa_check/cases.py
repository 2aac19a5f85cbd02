"""Named cases of DsaCheck: valid lists of DsaIndexer, and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.dsa_indexer.cases import IndexerLaunch, indexer_launch
from specbuild.plugins_cuda.dsa_indexer.op import reference as indexer
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.described import BUSHY, Branch, chain_of

Break = Callable[[np.ndarray], None]


def as_selected(launch: IndexerLaunch, rng: np.random.Generator) -> Arrays:
    """Return the op's inputs with DsaIndexer's lists; padding rows hold arbitrary values."""
    arrays = launch.arrays(rng)
    tensors: list[Any] = [None if a is None else torch.from_numpy(a) for a in arrays]
    selected: np.ndarray = indexer(*tensors, **launch.attributes).numpy()
    used = len(launch.launch.rows())
    selected[used:] = rng.integers(-5, 99, selected[used:].shape)
    return selected, *arrays[4:]


def lists(name: str, launch: IndexerLaunch, spoil: Break | None = None) -> Case:
    """The lists of a launch after ``spoil``; padding rows are unspecified."""

    def make(rng: np.random.Generator) -> Arrays:
        selected, *rest = as_selected(launch, rng)
        assert selected is not None
        if spoil is not None:
            spoil(selected)
        return selected, *rest

    attributes: dict[str, Any] = {**launch.attributes}
    del attributes["top_k"]
    compare = {"checked": np.s_[: len(launch.launch.rows())]}
    return Case(name, make, attributes, compare=compare)


def _swap(selected: np.ndarray) -> None:
    selected[1, 0, [2, 3]] = selected[1, 0, [3, 2]]


def _twice(selected: np.ndarray) -> None:
    selected[1, 0, 3] = selected[1, 0, 2]


def _one_more(selected: np.ndarray) -> None:
    row = selected[1, 0]
    free = np.setdiff1d(np.arange(row.max()), row)
    held = (row >= 0).sum()
    row[: held + 1] = np.sort([*row[:held], free[0]])


def _one_less(selected: np.ndarray) -> None:
    held = (selected[1, 0] >= 0).sum()
    selected[1, 0, 4:held] = [*selected[1, 0, 5:held], -1]


def _without_first(selected: np.ndarray) -> None:
    row = selected[1, 0]
    free = np.setdiff1d(np.arange(row.max()), row)
    held = (row >= 0).sum()
    row[:held] = np.sort([*row[1:held], free[0]])


def _put(entry: tuple[int, ...], value: int) -> Break:
    def spoil(selected: np.ndarray) -> None:
        selected[entry] = value

    return spoil


RAGGED = (Branch(30, 0, BUSHY), Branch(19, 4), Branch(21, 2, chain_of(5)))
_ASKED = indexer_launch(RAGGED, 5, 4, 8)
_VIEWS = indexer_launch(RAGGED, 5, 4, 8, views=2)
_MIXED = indexer_launch(RAGGED, 5, -1, 8, threshold=30)
_WHOLE = indexer_launch(RAGGED, -1, -1, -1)

CASES: tuple[Case, ...] = (
    lists("as they are", _ASKED),
    lists("as they are, a view per KV head", _VIEWS),
    lists("valid, some rows whole", _MIXED),
    lists("valid, all rows whole", _WHOLE),
    lists("as they are, one token", indexer_launch([Branch(0, 1)], 3, padding_rows=0)),
    lists("valid, fewer slots than the budget", indexer_launch([Branch(3, 2)], 8)),
    lists("two words of bits", indexer_launch([Branch(6, 0, chain_of(35))], 3)),
    lists("not rising", _ASKED, _swap),
    lists("a slot twice", _ASKED, _twice),
    lists("one slot too many", _ASKED, _one_more),
    lists("one slot too few", _ASKED, _one_less),
    lists("without the first token", _ASKED, _without_first),
    lists("a slot of the future", _ASKED, _put((14, 0, 9), 40)),
    lists("a sibling", _ASKED, _put((1, 0, -1), 36)),
    lists("far out of range", _ASKED, _put((1, 0, 4), 2**31 - 1)),
    lists("below zero", _ASKED, _put((1, 0, 0), -7)),
    lists("a mark where none belongs", _ASKED, _put((11, 0, 0), WHOLE)),
    lists("one KV head's list only", _VIEWS, _put((12, 1, 2), 0)),
    lists("no mark where one belongs", _WHOLE, _put((3, 0, 0), -1)),
    lists("more than the mark", _WHOLE, _put((3, 0, 5), 6)),
    lists("the only whole row", _MIXED, _put((12, 0, 0), 3)),
)
