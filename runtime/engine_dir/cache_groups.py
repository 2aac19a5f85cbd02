"""The slots and pages that one sequence needs in each cache group, computed from the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import (
    FP8_DTYPE,
    INDEXER_GROUP,
    CacheGroup,
    Limits,
    SpecPv,
    StateGroup,
)

FULL_GROUP = "full"
# Snapshots of recurrent states are at multiples of this number of tokens. Kernels that compute
# prompts in chunks can stop there without changing a bit.
SNAPSHOT_STEP = 64
DEFAULT_SNAPSHOT_INTERVAL = 2048
# Bytes of page-locked memory for them, where states are on a GPU.
DEFAULT_SNAPSHOT_MEMORY = 4 << 30
# Full-attention layers that cache latents.
LATENT_GROUP = "latent"
# The bytes of each element type of caches.
CACHED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, FP8_DTYPE: 1}


def slot_bytes(group: StateGroup) -> int:
    """Return the bytes of one sequence's recurrent states, summed over the layers of this group."""
    shapes = group.pool_shapes.values()
    return len(group.layers) * sum(
        CACHED_BYTES[dtype] * math.prod(shape[1:]) for dtype, shape in shapes
    )


def choosing_group(config: SpecPv) -> str:
    """Return the cache group whose keys select the blocks of SpecPV."""
    return INDEXER_GROUP if config.score == "indexer" else FULL_GROUP


def tree_slots(group: str, limits: Limits) -> int:
    """Return the slots of a tree after the committed tokens: N + 1, in the draft K·(D − 1).

    A draft with blocks of queries needs slots for the rows of a block.
    """
    if group in DRAFT_GROUPS:
        return max(limits.draft_top_k * max(limits.draft_depth - 1, 0), limits.draft_block)
    return limits.draft_tokens + 1


def slots_per_sequence(limits: Limits) -> int:
    """Return the slots that a sequence of maximum length needs in any group, including its tree."""
    return limits.max_seq_len + max(tree_slots(name, limits) for name in ("", DRAFT_GROUP))


def pages_per_sequence(
    group: str, limits: Limits, *, tokens: int, page_size: int, window: int
) -> int:
    """Return the maximum number of pages that a sequence of ``tokens`` tokens has in a group.

    A group with a window needs pages for the window and the rows of the largest launch, which may
    start inside a page. If a step is queued after another one, these rows are its tree, the tokens
    that either may emit, and the rows that the draft has not ingested.
    """
    tree = tree_slots(group, limits)
    pages = -(-(tokens + tree) // page_size)
    if window == 0:
        return pages
    cached_tokens = window - 1 + max(limits.max_rows, tree + 3 * (limits.draft_depth + 1))
    return min(pages, -(-cached_tokens // page_size) + 1)


def group_pages(group: CacheGroup, limits: Limits, *, tokens: int) -> int:
    """Return the maximum pages of a sequence of ``tokens`` tokens in an engine's group."""
    return pages_per_sequence(
        group.name, limits, tokens=tokens, page_size=group.page_size, window=group.window
    )


def allocators(groups: Sequence[CacheGroup]) -> dict[str, tuple[str, ...]]:
    """Return the groups that share one page allocator, by the first of them.

    The target's groups without a window store a sequence's tokens in pages of equal numbers. One
    page table therefore serves its keys, its latents and its indexers' keys.
    """
    groups_of_layout: dict[object, list[str]] = {}
    for group in groups:
        alone = group.window > 0 or group.name in DRAFT_GROUPS
        key = group.name if alone else (group.page_size, group.pages)
        groups_of_layout.setdefault(key, []).append(group.name)
    return {names[0]: tuple(names) for names in groups_of_layout.values()}


def sequences_together(groups: Sequence[CacheGroup], limits: Limits, tokens: int) -> int:
    """Return how many sequences of up to ``tokens`` tokens can reserve their pages at once."""
    return min(
        limits.max_batch_size,
        *((group.pages - 1) // group_pages(group, limits, tokens=tokens) for group in groups),
    )
