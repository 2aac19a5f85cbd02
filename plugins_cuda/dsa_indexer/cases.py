"""Named cases of DsaIndexer: the launches of PagedTreeAttention over a pool of indexer keys.

Queries, keys and head weights are small integers. Every score is then exact in any order of
summation, and all implementations have the same ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.paged_tree_attention.described import BUSHY, Branch, Launch, chain_of


@dataclass(frozen=True)
class IndexerLaunch:
    """A launch, an indexer's geometry, and its mandatory slots.

    ``budgets`` has one number per sequence. ``hidden`` positions are between the view's first slots
    and the others: the positions of rows exceed their slots by this number.
    """

    launch: Launch
    budgets: Sequence[int]
    heads: int = 2
    weighted: bool = True
    top_k: int = 8
    threshold: int = 0
    first_tokens: int = 2
    recent_tokens: int = 3
    hidden: int = 0
    largest: int = 3
    fp8: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's attributes."""
        names = ("top_k", "threshold", "first_tokens", "recent_tokens")
        return {name: getattr(self, name) for name in names}

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs; slots that no sequence uses are NaN."""
        drawn = self.launch.arrays(rng)
        shape, pool, bits = drawn[0], drawn[1], drawn[7]
        assert shape is not None and pool is not None and bits is not None
        used, total = len(self.launch.rows()), len(shape)

        def integers(*sizes: int) -> np.ndarray:
            return rng.integers(-self.largest, self.largest + 1, sizes).astype(np.float32)

        # A slot that is used in the view of any KV head has a key.
        unused = np.isnan(pool).all(axis=1, keepdims=True)
        keys = np.where(unused, np.float32(np.nan), integers(*unused.shape))
        if self.fp8:
            keys = _as_fp8(keys)
        q = integers(total, self.heads, pool.shape[3])
        weights = integers(total, self.heads) if self.weighted else None
        q[used:] = np.nan
        if weights is not None:
            weights[used:] = np.nan
        positions = np.zeros(total, np.int32)
        for row, (_, branch, slot, lineage) in enumerate(self.launch.rows()):
            seen = branch.tree_start + len(lineage) if lineage else slot + 1
            positions[row] = seen - 1 + self.hidden
        return q, weights, keys, *drawn[3:8], positions, np.array(self.budgets, np.int32)

    def case(self, name: str) -> Case:
        """Return this launch as a case; padding rows are unspecified."""
        compare = {"selected": np.s_[: len(self.launch.rows())]}
        return Case(name, self.arrays, self.attributes, compare=compare)


def _as_fp8(keys: np.ndarray) -> np.ndarray:
    """Convert keys to e4m3 bytes."""
    import torch

    return torch.from_numpy(keys).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def indexer_launch(
    branches: Sequence[Branch],
    *budgets: int,
    heads: int = 2,
    weighted: bool = True,
    width: int = 8,
    views: int = 1,
    page_size: int = 4,
    padding_rows: int = 2,
    padding_pages: int = 1,
    **indexer: Any,
) -> IndexerLaunch:
    """Create a launch; ``views`` > 1 gives each of so many KV heads a separate view."""
    launch = Launch(
        branches, kv_heads=views, group=1, width=width, v_width=1, page_size=page_size,
        sinks=False, view_per_head=views > 1, padding_rows=padding_rows,
        padding_pages=padding_pages,
    )  # fmt: skip
    return IndexerLaunch(launch, budgets, heads, weighted, **indexer)


RAGGED = (Branch(30, 0, BUSHY), Branch(9, 4), Branch(21, 2, chain_of(5)))

_LAUNCHES = {
    "one token, nothing before it": indexer_launch([Branch(0, 1)], 3, padding_rows=0),
    "decode": indexer_launch([Branch(25, 1)], 5, padding_rows=0),
    "decode, ragged batch": indexer_launch([Branch(25, 1), Branch(2, 1), Branch(40, 1)], 5, 5, 8),
    "as many as there are": indexer_launch([Branch(13, 1)], 8, first_tokens=2, recent_tokens=4),
    "one less than there are": indexer_launch([Branch(14, 1)], 8, recent_tokens=4),
    "more than there are": indexer_launch([Branch(6, 2)], 8),
    "nothing but what must stay": indexer_launch([Branch(20, 0, BUSHY)], 0),
    "no first tokens, no recent ones but itself": indexer_launch(
        [Branch(20, 3)], 4, first_tokens=0, recent_tokens=1
    ),
    "first and recent overlap": indexer_launch([Branch(4, 3)], 2, first_tokens=4, recent_tokens=6),
    "simple form": indexer_launch([Branch(25, 2, BUSHY)], 6, heads=1, weighted=False),
    "one weighted head": indexer_launch([Branch(25, 2)], 6, heads=1),
    "heads without weights": indexer_launch([Branch(25, 2)], 6, heads=3, weighted=False),
    "trees, ragged": indexer_launch(RAGGED, 5, 4, 8),
    "one sequence selects everything": indexer_launch(RAGGED, 5, -1, 8),
    "all sequences select everything": indexer_launch(RAGGED, -1, -1, -1),
    "below the threshold": indexer_launch(RAGGED, 5, 4, 8, threshold=60),
    "the threshold lies inside a chunk": indexer_launch([Branch(10, 9)], 3, threshold=14),
    "the threshold lies inside a tree": indexer_launch([Branch(20, 0, BUSHY)], 3, threshold=22),
    "a view that hides some": indexer_launch([Branch(20, 2, BUSHY)], 3, threshold=60, hidden=45),
    "ties": indexer_launch([Branch(40, 2, BUSHY)], 6, largest=1),
    "all scores equal": indexer_launch([Branch(30, 2)], 6, largest=0),
    "a view per KV head": indexer_launch(RAGGED, 5, 4, 8, views=3),
    "a view per KV head, one sequence": indexer_launch([Branch(30, 2, BUSHY)], 6, views=2),
    "bits 31 and 32": indexer_launch([Branch(6, 0, chain_of(35)), Branch(9, 0, BUSHY)], 3, 2),
    "recent tokens end inside the tree": indexer_launch(
        [Branch(12, 0, chain_of(6))], 3, recent_tokens=3
    ),
    "sequences without rows": indexer_launch([Branch(4, 0), Branch(16, 2, BUSHY)], 2, 4),
    "many keys of a large page": indexer_launch(
        [Branch(300, 3, chain_of(3))], 24, page_size=16, width=32, heads=4, top_k=24
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(launch.case(name) for name, launch in _LAUNCHES.items())

_KERNEL_LAUNCHES = {
    "more keys than threads": indexer_launch(
        [Branch(1500, 3, chain_of(3)), Branch(1100, 0, BUSHY)], 200, 90,
        heads=3, width=40, page_size=16, top_k=200,
    ),
    "ties of more keys than threads": indexer_launch(
        [Branch(2300, 1)], 700, heads=1, weighted=False, page_size=64, top_k=700, largest=1
    ),
    "nine heads of 256": indexer_launch(
        [Branch(90, 0, BUSHY)], 20, heads=9, width=256, page_size=32, top_k=20
    ),
    "negative scores": indexer_launch(
        [Branch(200, 2)], 60, heads=2, width=16, page_size=16, top_k=60, first_tokens=0
    ),
}  # fmt: skip

_GPU_LAUNCHES = {
    "a chain of 4 at 131k": indexer_launch(
        [Branch(131000, 0, chain_of(4))], 2048, heads=4, width=256, page_size=64, top_k=2048,
        first_tokens=4, recent_tokens=64, padding_rows=0,
    ),
    "a chain of 4 at 131k, fp8 keys of 64": indexer_launch(
        [Branch(131000, 0, chain_of(4))], 2048, heads=4, width=64, page_size=64, top_k=2048,
        first_tokens=4, recent_tokens=64, padding_rows=0, fp8=True,
    ),
    "one token at 131k, fp8 keys of 64": indexer_launch(
        [Branch(131000, 1)], 2048, heads=4, width=64, page_size=64, top_k=2048,
        first_tokens=4, recent_tokens=64, padding_rows=0, fp8=True,
    ),
    "simple form at 131k": indexer_launch(
        [Branch(131000, 1)], 2048, heads=1, weighted=False, width=256, page_size=64, top_k=2048,
        first_tokens=4, recent_tokens=64, padding_rows=0,
    ),
    "8 sequences of 32k": indexer_launch(
        [Branch(32000 - 77 * b, 0, chain_of(4)) for b in range(8)], *[2048] * 8,
        heads=4, width=64, page_size=64, top_k=2048, first_tokens=4, recent_tokens=64,
    ),
}  # fmt: skip

KERNEL_CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _KERNEL_LAUNCHES.items()),
    *(launch.case(f"gpu: {name}") for name, launch in _GPU_LAUNCHES.items()),
)
