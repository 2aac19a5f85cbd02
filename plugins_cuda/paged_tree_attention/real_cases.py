"""Launches of PagedTreeAttention at the sizes of real models, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbuild.plugins_cuda.paged_tree_attention.described import BUSHY, Branch, Launch, chain_of


def wide(branches: Sequence[Branch], **changes: Any) -> Launch:
    """A launch with Llama's heads: 4 of 128 per KV head."""
    shape = {"kv_heads": 2, "group": 4, "width": 128, "v_width": 128, "page_size": 64}
    return Launch(branches, **(shape | changes))


def widest(branches: Sequence[Branch], **changes: Any) -> Launch:
    """A launch with heads wider than 128; by default those of Qwen3.5: 6 of 256 per KV head."""
    shape = {"kv_heads": 2, "group": 6, "width": 256, "v_width": 256, "page_size": 16}
    return Launch(branches, **(shape | changes))


def _real(branches: Sequence[Branch], **changes: Any) -> Launch:
    """A launch with GPT-OSS's heads and pages."""
    return Launch(
        branches, kv_heads=8, group=8, width=64, v_width=64, page_size=64, **changes
    )  # fmt: skip


REAL_LAUNCHES = {
    "decode at 1k": _real([Branch(1023, 1)], padding_rows=0),
    "decode at 32k": _real([Branch(32767, 1)], padding_rows=0),
    "decode at 131k": _real([Branch(131071, 1)], padding_rows=0),
    "decode at 4k, window": _real([Branch(4090, 1)], window=128, padding_rows=0),
    "verify a chain of 4 at 1k": _real([Branch(1000, 0, chain_of(4))], padding_rows=0),
    "a block of 8 at 1k": _real(
        [Branch(1000, 0, chain_of(8), block=True)], sinks=False, padding_rows=0
    ),
    "16 blocks of 10": _real(
        [Branch(100 + 211 * b, 0, chain_of(10), block=True) for b in range(16)], sinks=False
    ),
    "blocks of 16 at 20k": _real(
        [Branch(20000 - 900 * b, 0, chain_of(16), block=True) for b in range(3)], padding_rows=0
    ),
    "verify a tree of 10 at 32k": _real([Branch(32700, 0, BUSHY)], padding_rows=0),
    "verify a tree of 10 at 1k, window": _real(
        [Branch(1000, 0, BUSHY)], window=128, padding_rows=0
    ),
    "16 sequences at 1k": _real([Branch(960 + 8 * b, 1) for b in range(16)], padding_rows=0),
    "verify 16 sequences, ragged": _real(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)]
    ),
    "64 sequences, window": _real(
        [Branch(17 * b, 1) for b in range(64)], window=128, padding_rows=0
    ),
    "a refresh: 48 tokens and a chain at 131k": _real(
        [Branch(131000, 48, chain_of(4))], padding_rows=12
    ),
    "a refresh of one in a batch": _real(
        [Branch(20000, 48, chain_of(4)), *(Branch(4100 + b, 0, chain_of(4)) for b in range(7))]
    ),
    "verify a tree of 8 at 66k": _real([Branch(66000, 0, BUSHY[:8])], padding_rows=0),
    "8 trees of 8 nodes at 9k to 30k": _real(
        [Branch(9000 + 3000 * b, 0, BUSHY[:8]) for b in range(8)], padding_rows=0
    ),
    "trees of 24 nodes at 9k": _real(
        [Branch(9000 + 40 * b, 0, (*BUSHY, *range(9, 24))) for b in range(3)], padding_rows=0
    ),
    "selected: 2116 of 131k": _real([Branch(131071, 1)], selected=2148, padding_rows=0),
    "selected: a chain of 4 at 131k": _real(
        [Branch(131000, 0, chain_of(4))], selected=2148, padding_rows=0
    ),
    "selected: thousands of 131k": _real(
        [Branch(131071, 1), Branch(20000, 0, chain_of(4))], selected=20000, padding_rows=0
    ),
    "selected: 8 chains of 4 at 8k, some whole": _real(
        [Branch(8000 + 31 * b, 0, chain_of(4)) for b in range(8)], selected=2148, whole_rows=1
    ),
    "prompt chunk of 500 at 1k": _real([Branch(1000, 500)]),
    "heads of 128, decode at 32k": wide([Branch(32767, 1)], kv_heads=8, padding_rows=0),
    "heads of 128, decode at 131k": wide([Branch(131071, 1)], kv_heads=8, padding_rows=0),
    "heads of 128, a chain of 4 at 1k": wide(
        [Branch(1000, 0, chain_of(4))], kv_heads=8, padding_rows=0
    ),
    "heads of 128, a tree of 10 at 32k": wide(
        [Branch(32700, 0, BUSHY)], kv_heads=8, padding_rows=0
    ),
    "8 heads of 128 a KV head, a tree of 8 at 66k": wide(
        [Branch(66000, 0, BUSHY[:8])], kv_heads=8, group=8, padding_rows=0
    ),
    "heads of 128, 16 sequences, ragged": wide(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)], kv_heads=8
    ),
    "heads of 128, 8 trees of 8 nodes at 9k to 30k": wide(
        [Branch(9000 + 3000 * b, 0, BUSHY[:8]) for b in range(8)], kv_heads=8, padding_rows=0
    ),
    "heads of 128, a refresh of one in a batch": wide(
        [Branch(20000, 48, chain_of(4)), *(Branch(4100 + b, 0, chain_of(4)) for b in range(7))],
        kv_heads=8,
    ),
    "heads of 128, prompt chunk of 700 at 1k": wide([Branch(1000, 700)], kv_heads=8),
    "heads of 128, prompt chunks, ragged, window": wide(
        [Branch(0, 300), Branch(777, 130)], kv_heads=8, window=128
    ),
    "16 heads of 128 a KV head, a chain of 4 at 8k": wide(
        [Branch(8000, 0, chain_of(4))], kv_heads=4, group=16, padding_rows=0
    ),
    "heads of 256, decode at 8k": widest(
        [Branch(8191, 1)], kv_heads=2, group=8, page_size=64, padding_rows=0
    ),
    "heads of 256, a chain of 4 at 32k": widest(
        [Branch(32000, 0, chain_of(4))], kv_heads=4, page_size=64, padding_rows=0
    ),
    "heads of 256, 16 sequences, ragged": widest(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)],
        kv_heads=4,
        page_size=64,
    ),
    "heads of 256, prompt chunk of 700 at 1k": widest(
        [Branch(1000, 700)], kv_heads=2, group=8, page_size=64
    ),
    "heads of 256, prompt chunks, ragged": widest(
        [Branch(0, 300), Branch(777, 130)], kv_heads=4, page_size=64
    ),
    "heads of 512, decode at 8k": widest(
        [Branch(8191, 1)],
        kv_heads=4,
        group=8,
        width=512,
        v_width=512,
        page_size=64,
        padding_rows=0,
    ),
    "prompt chunks, ragged, window": _real([Branch(0, 300), Branch(777, 130)], window=128),
    "codes, decode at 131k": _real([Branch(131071, 1)], padding_rows=0, codes=True),
    "codes, verify a chain of 4 at 1k": _real(
        [Branch(1000, 0, chain_of(4))], padding_rows=0, codes=True
    ),
    "codes, a tree of 24 nodes at 9k": _real(
        [Branch(9000, 0, (*BUSHY, *range(9, 24)))], padding_rows=0, codes=True
    ),
    "codes, verify 16 sequences, ragged": _real(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)], codes=True
    ),
    "codes, 64 sequences, window": _real(
        [Branch(17 * b, 1) for b in range(64)], window=128, padding_rows=0, codes=True
    ),
    "codes, prompt chunk of 500 at 1k": _real([Branch(1000, 500)], codes=True),
    "codes, heads of 128, a tree of 10 at 32k": wide(
        [Branch(32700, 0, BUSHY)], kv_heads=8, padding_rows=0, codes=True
    ),
    "codes, heads of 128, prompt chunk of 700 at 1k": wide(
        [Branch(1000, 700)], kv_heads=8, codes=True
    ),
}
