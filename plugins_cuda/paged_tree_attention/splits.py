"""The splits of a layer's context: constants, because the order of a row's sums depends on them."""

from __future__ import annotations

from specbuild.plugins_cuda.paged_tree_attention.geometry import TILE_KEYS, Geometry

TILE_RUNS = 4  # of a split, one per team
CHUNK_KEYS = TILE_RUNS * TILE_KEYS
# A CTA per split and KV head should fill the GPU. A short window has few chunks, which one CTA
# processes.
MAX_SPLITS, FEWEST_SPLITS = 32, 16
CTAS_WANTED = 128
WIDEST_UNSPLIT_WINDOW = 1024


def splits_of(shape: Geometry) -> tuple[int, int]:
    """Return the number of splits of a context, and how many of them a view can fill."""
    split = 1
    if not 0 < shape.window <= WIDEST_UNSPLIT_WINDOW:
        required = power_of_two(CTAS_WANTED // shape.kv_heads)
        split = max(FEWEST_SPLITS, min(required, MAX_SPLITS))
    return split, min(split, -(-shape.capacity // CHUNK_KEYS))


def power_of_two(value: int) -> int:
    """Return the greatest power of two up to ``value``."""
    return 1 << (max(1, value).bit_length() - 1)
