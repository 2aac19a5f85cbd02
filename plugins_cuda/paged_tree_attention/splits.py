"""Splits of a layer's context: constants, since a row's sums are taken split by split."""

from __future__ import annotations

from specbuild.plugins_cuda.paged_tree_attention.geometry import TILE_KEYS, Geometry

TILE_RUNS = 4  # of a split, each a team's
CHUNK_KEYS = TILE_RUNS * TILE_KEYS
# A CTA per split and KV head is to fill the GPU. A short window spans few chunks, which one CTA
# takes.
MAX_SPLITS, FEWEST_SPLITS = 32, 16
CTAS_WANTED = 128
WIDEST_UNSPLIT_WINDOW = 1024


def splits_of(shape: Geometry) -> tuple[int, int]:
    """Into how many splits contexts are cut, and how many of them a view can fill."""
    split = 1
    if not 0 < shape.window <= WIDEST_UNSPLIT_WINDOW:
        wanted = power_of_two(CTAS_WANTED // shape.kv_heads)
        split = max(FEWEST_SPLITS, min(wanted, MAX_SPLITS))
    return split, min(split, -(-shape.capacity // CHUNK_KEYS))


def power_of_two(value: int) -> int:
    """The greatest one that is not above."""
    return 1 << (max(1, value).bit_length() - 1)
