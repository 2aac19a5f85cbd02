"""Named cases of PagedTreeAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.paged_tree_attention.described import BUSHY, Branch, Launch, chain_of
from specbuild.plugins_cuda.paged_tree_attention.real_cases import REAL_LAUNCHES, wide, widest

__all__ = ("BUSHY", "CASES", "KERNEL_CASES", "Branch", "Launch", "chain_of")


def _opposed(launch: Launch, sink: float, rng: np.random.Generator) -> Arrays:
    """A launch whose scores all equal −``sink``."""
    q, k, v, *middle, _, selected = launch.arrays(rng)
    assert q is not None and k is not None
    side = (abs(sink) / launch.attributes["scale"] / launch.width) ** 0.5
    keys = np.where(np.isnan(k), k, np.float32(-side * np.sign(sink)))
    queries = np.where(np.isnan(q), q, np.float32(side))
    return queries, keys, v, *middle, np.full(q.shape[1], sink, np.float32), selected


def _with_sinks(name: str, sink: float) -> Case:
    launch = Launch([Branch(9, 0, BUSHY), Branch(0, 5)], window=4)
    return Case(
        name,
        lambda rng: _opposed(launch, sink, rng),
        launch.attributes,
        compare={"attended": np.s_[: len(launch.rows())]},
    )


def _without_ancestors(name: str, launch: Launch) -> Case:
    """Rows at tree slots that attend to no tree slot, as those of a draft without a cache."""

    def arrays(rng: np.random.Generator) -> Arrays:
        *before, bits, sinks, selected = launch.arrays(rng)
        assert bits is not None
        return *before, np.zeros_like(bits), sinks, selected

    rows = np.s_[: len(launch.rows())]
    return Case(name, arrays, launch.attributes, compare={"attended": rows})


_LAUNCHES = {
    "one token, nothing before it": Launch([Branch(0, 1)], padding_rows=0, padding_pages=0),
    "decode": Launch([Branch(13, 1)], padding_rows=0),
    "decode, ragged batch": Launch([Branch(13, 1), Branch(0, 1), Branch(31, 1)]),
    "decode at a page boundary": Launch([Branch(7, 1), Branch(8, 1)], padding_pages=0),
    "prefill from nothing": Launch([Branch(0, 19)]),
    "prefill chunk after context": Launch([Branch(6, 9), Branch(0, 3)]),
    "prefill without sinks": Launch([Branch(3, 9)], sinks=False),
    "prefill, window shorter than the context": Launch([Branch(11, 9)], window=5),
    "prefill, window longer than the context": Launch([Branch(3, 4)], window=64),
    "decode, window of one": Launch([Branch(9, 1), Branch(2, 1)], window=1),
    "verify chain": Launch([Branch(10, 0, chain_of(4))], padding_rows=0),
    "verify tree": Launch([Branch(10, 0, BUSHY)]),
    "verify tree at the very start": Launch([Branch(0, 0, BUSHY)]),
    "verify trees, ragged": Launch(
        [Branch(10, 0, BUSHY), Branch(3, 0, (-1,)), Branch(25, 0, chain_of(5))]
    ),
    "window by node depth, siblings": Launch([Branch(10, 0, BUSHY)], window=3),
    "window of two inside the tree": Launch([Branch(5, 0, BUSHY), Branch(1, 2)], window=2),
    "sequences without rows": Launch([Branch(4, 0), Branch(6, 2, BUSHY), Branch(0, 0)]),
    "chain, then tree": Launch([Branch(5, 4, BUSHY), Branch(0, 7, chain_of(3))], window=6),
    "draft level 1": Launch([Branch(9, 0, (-1, -1, -1)), Branch(4, 0, (-1, -1))]),
    "draft level 3": Launch(
        [Branch(9, 0, (-1, -1, -1, 0, 0, 2, 3, 5, 5), (6, 7, 8))], window=4, group=1
    ),
    "blocks that see all of themselves": Launch(
        [Branch(10, 0, chain_of(6), block=True), Branch(3, 0, chain_of(6), block=True)]
    ),
    "a block of more than a word": Launch([Branch(5, 0, chain_of(34), block=True)], sinks=False),
    "bits 31 and 32": Launch([Branch(6, 0, chain_of(35)), Branch(2, 0, BUSHY)], window=33),
    "three words, more than needed": Launch([Branch(6, 0, chain_of(33))], words=3),
    "grouped query 8 of width 64": Launch(
        [Branch(40, 0, BUSHY), Branch(70, 1)], group=8, width=64, v_width=64, page_size=16
    ),
    "tiles fully masked by the window": Launch(
        [Branch(300, 0, BUSHY), Branch(150, 3)], window=4, page_size=16
    ),
    "multi-query, wider keys than values": Launch(
        [Branch(7, 2, BUSHY)], kv_heads=1, group=4, width=24, v_width=8
    ),
    "a view per KV head": Launch(
        [Branch(10, 2, BUSHY), Branch(5, 1)], view_per_head=True, kv_heads=3
    ),
    "a view per KV head, one sequence": Launch([Branch(9, 0, BUSHY)], view_per_head=True),
    "selected slots": Launch([Branch(20, 3, BUSHY), Branch(4, 2)], selected=6),
    "selected slots, window, view per head": Launch(
        [Branch(20, 0, BUSHY)], selected=9, window=7, view_per_head=True, sinks=False
    ),
    "selected slots, a list per KV head": Launch(
        [Branch(20, 0, BUSHY), Branch(9, 2)], selected=7, lists_per_head=True, view_per_head=True
    ),
    "selected slots, lists per KV head, one sequence": Launch(
        [Branch(20, 3, BUSHY)], selected=7, lists_per_head=True, kv_heads=3
    ),
    "selected slots, some rows whole": Launch(
        [Branch(20, 3, BUSHY), Branch(4, 2)], selected=6, whole_rows=1
    ),
    "selected slots, all rows whole": Launch([Branch(20, 1)], selected=3, whole_rows=0),
}

CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _LAUNCHES.items()),
    _with_sinks("sink far above every score", 80.0),
    _with_sinks("sink far below every score", -80.0),
    _without_ancestors(
        "rows without ancestors, window",
        Launch([Branch(9, 0, (-1, -1, -1)), Branch(30, 0, (-1,))], window=4),
    ),
)


def _coded(branches: Sequence[Branch], **changes: Any) -> Launch:
    """The same with a cache in fp8."""
    return wide(branches, codes=True, **({"page_size": 16} | changes))


_KERNEL_LAUNCHES = {
    "heads of 256": widest([Branch(50, 3, chain_of(3)), Branch(70, 1), Branch(0, 1)]),
    "heads of 256, trees": widest([Branch(40, 0, BUSHY), Branch(3, 0, chain_of(5))], window=30),
    "heads of 256, longer than a split": widest(
        [Branch(600, 2), Branch(300, 0, BUSHY)], kv_heads=1, group=8, sinks=False,
    ),
    "heads of 256, 11 on a KV head": widest([Branch(90, 5)], kv_heads=1, group=11),
    "heads of 512": widest(
        [Branch(50, 3, chain_of(3)), Branch(40, 0, BUSHY), Branch(0, 1)], kv_heads=1, group=8,
        width=512, v_width=512, sinks=False,
    ),
    "heads of 512, longer than a split": widest(
        [Branch(300, 2)], kv_heads=2, group=4, width=512, v_width=512, sinks=False,
    ),
    "example geometry, 6 on 2 heads of 32": Launch(
        [Branch(37, 0, BUSHY), Branch(64, 1), Branch(0, 3)], group=3, width=32, v_width=32,
        page_size=16,
    ),
    "heads of 128": Launch(
        [Branch(50, 3, chain_of(3))], group=8, width=128, v_width=128, page_size=16, kv_heads=1
    ),
    "more rows than a CTA takes": Launch(
        [Branch(30, 0, (*BUSHY, *range(9, 24))), Branch(3, 0, chain_of(2))], page_size=32
    ),
    "one sequence has nearly all rows": Launch(
        [Branch(2, 1), Branch(70, 21), Branch(5, 1), Branch(9, 0)], page_size=64, window=40
    ),
    "many rows of one sequence, few of others": Launch(
        [Branch(2, 1), Branch(270, 61, BUSHY), Branch(5, 0, chain_of(3)), Branch(9, 0)], group=8,
        width=64, v_width=64, page_size=64, padding_pages=130,
    ),
    "several rows, capacity for a long context": Launch(
        [Branch(270 - 31 * b, 0, BUSHY[:7]) for b in range(7)], kv_heads=1, group=8, width=64,
        v_width=64, page_size=64, padding_pages=1020,
    ),
    "a tree behind rows, capacity for a long context": Launch(
        [Branch(270, 6, BUSHY), Branch(140, 3, BUSHY)], kv_heads=1, group=8, width=64, v_width=64,
        page_size=16, padding_pages=4096,
    ),
    "a view per KV head, many rows": Launch(
        [Branch(310, 13, (*BUSHY, *range(9, 24)))], view_per_head=True, group=4, width=64,
        v_width=64, page_size=32, padding_pages=250, sinks=False,
    ),
    "longer than the context's splits": Launch(
        [Branch(4300, 0, BUSHY)], kv_heads=1, page_size=64, padding_rows=0
    ),
    "selected slots of several chunks": Launch(
        [Branch(700, 0, BUSHY), Branch(500, 2)], kv_heads=1, group=8, page_size=64, selected=600,
        whole_rows=2,
    ),
    "prompt chunks over several tiles, heads of 64": Launch(
        [Branch(420, 40), Branch(0, 25), Branch(130, 3, BUSHY), Branch(255, 1)], kv_heads=2,
        group=8, width=64, v_width=64, page_size=32,
    ),
    "a window that is split": Launch(
        [Branch(1700, 0, chain_of(3))], kv_heads=1, page_size=64, window=1500
    ),
    "4 heads of 128 a KV head, trees": wide([Branch(50, 0, BUSHY), Branch(170, 1), Branch(0, 3)]),
    "heads of 128, many rows of one sequence": wide(
        [Branch(2, 1), Branch(270, 61, BUSHY), Branch(5, 0, chain_of(3)), Branch(9, 0)],
        padding_pages=130,
    ),
    "8 heads of 128 a KV head, several rows, capacity for a long context": wide(
        [Branch(270 - 31 * b, 0, BUSHY[:7]) for b in range(7)], kv_heads=1, group=8,
        padding_pages=1020,
    ),
    "heads of 128, a view per KV head, many rows": wide(
        [Branch(310, 13, (*BUSHY, *range(9, 24)))], view_per_head=True, page_size=32,
        padding_pages=250, sinks=False,
    ),
    "heads of 128, prompt chunks over several tiles": wide(
        [Branch(420, 40), Branch(0, 25), Branch(130, 3, BUSHY), Branch(255, 1)], page_size=32
    ),
    "16 heads of 128 a KV head": wide(
        [Branch(140, 0, BUSHY), Branch(300, 1), Branch(0, 5)], group=16, view_per_head=True
    ),
    "10 heads of 64 a KV head, selected": wide(
        [Branch(140, 0, BUSHY), Branch(200, 1)], group=10, width=64, v_width=64, selected=90,
        whole_rows=1, lists_per_head=True,
    ),
    "blocks over several chunks": Launch(
        [Branch(700, 0, chain_of(8), block=True), Branch(126, 0, chain_of(8), block=True)],
        kv_heads=1, group=8, width=64, v_width=64, page_size=64, sinks=False,
    ),
    "blocks, capacity for a long context": Launch(
        [Branch(270 - 31 * b, 0, chain_of(8), block=True) for b in range(7)], kv_heads=1, group=8,
        width=64, v_width=64, page_size=64, padding_pages=1020,
    ),
    "blocks of many rows": Launch(
        [Branch(270, 0, chain_of(16), block=True), Branch(90, 0, chain_of(16), block=True)],
        kv_heads=1, group=8, width=64, v_width=64, page_size=64, padding_pages=130,
    ),
    "heads of 128, blocks": wide(
        [Branch(170, 0, chain_of(10), block=True), Branch(50, 0, chain_of(10), block=True)]
    ),
    "codes, 8 heads of 64 a KV head, trees": _coded(
        [Branch(140, 0, BUSHY), Branch(300, 1), Branch(0, 5)], group=8, width=64, v_width=64
    ),
    "codes, alone, two chunks": _coded([Branch(200, 1)], group=3, width=32, v_width=32),
    "codes, a window": _coded(
        [Branch(300, 0, BUSHY), Branch(150, 3)], window=40, group=8, width=64, v_width=64
    ),
    "codes, 4 heads of 128 a KV head": _coded(
        [Branch(50, 0, (*BUSHY, *range(9, 24))), Branch(170, 2), Branch(0, 3)]
    ),
    "codes, heads of 96, a view per KV head": _coded(
        [Branch(130, 0, BUSHY), Branch(70, 1)], group=5, width=96, v_width=96, view_per_head=True
    ),
    "codes, longer than the context's splits": _coded(
        [Branch(4300, 0, BUSHY)], kv_heads=1, group=8, width=64, v_width=64, page_size=64
    ),
    "codes, capacity for a long context": _coded(
        [Branch(270, 0, BUSHY[:7]), Branch(90, 0, chain_of(6), block=True)], kv_heads=1, group=8,
        width=64, v_width=64, page_size=64, padding_pages=1020,
    ),
    "codes, selected slots": _coded(
        [Branch(300, 0, BUSHY), Branch(200, 2)], group=8, width=64, v_width=64, selected=90,
        whole_rows=2,
    ),
    "codes, many sequences": _coded(
        [Branch(130 + 31 * b, 0, chain_of(1 + b % 3)) for b in range(9)], kv_heads=8, group=2,
        width=32, v_width=32,
    ),
    "heads of 80": wide([Branch(50, 0, BUSHY), Branch(170, 1)], width=80, v_width=80),
    "heads of 96": wide(
        [Branch(50, 0, BUSHY), Branch(170, 4)], width=96, v_width=96, group=5, page_size=16
    ),
    "heads of 96, window": wide([Branch(90, 9), Branch(7, 1)], width=96, v_width=96, window=40),
}  # fmt: skip


KERNEL_CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _KERNEL_LAUNCHES.items()),
    _without_ancestors(
        "heads of 256, rows without ancestors",
        widest([Branch(40, 0, (-1,)), Branch(300, 0, (-1, -1, -1))], window=30),
    ),
    _without_ancestors(
        "heads of 512, rows without ancestors",
        widest(
            [Branch(50, 0, (-1, -1, -1)), Branch(300, 0, (-1,))],
            kv_heads=1,
            group=8,
            width=512,
            v_width=512,
            sinks=False,
        ),
    ),
    *(launch.case(f"gpu: {name}") for name, launch in REAL_LAUNCHES.items()),
)
