"""What one sequence takes of each cache group: slots and pages, counted from the limits."""

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
# Snapshots of recurrent states are at multiples of so many tokens, where kernels that compute
# prompts in chunks may stop without changing a bit.
SNAPSHOT_STEP = 64
DEFAULT_SNAPSHOT_INTERVAL = 2048
# Full-attention layers that cache latents.
LATENT_GROUP = "latent"
# Element types of caches, and their bytes.
CACHED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, FP8_DTYPE: 1}


def slot_bytes(group: StateGroup) -> int:
    """Bytes of one sequence's recurrent states, over all layers of this group."""
    shapes = group.pool_shapes.values()
    return len(group.layers) * sum(
        CACHED_BYTES[dtype] * math.prod(shape[1:]) for dtype, shape in shapes
    )


def choosing_group(config: SpecPv) -> str:
    """The cache group whose keys SpecPV chooses blocks by."""
    return INDEXER_GROUP if config.score == "indexer" else FULL_GROUP


def tree_slots(group: str, limits: Limits) -> int:
    """Slots that a tree takes behind the committed tokens: N + 1, in the draft K·(D − 1).

    A draft whose queries are a block has slots for that.
    """
    if group in DRAFT_GROUPS:
        return max(limits.draft_top_k * max(limits.draft_depth - 1, 0), limits.draft_block)
    return limits.draft_tokens + 1


def slots_per_sequence(limits: Limits) -> int:
    """Slots that a sequence of full length needs in any group, its tree included."""
    return limits.max_seq_len + max(tree_slots(name, limits) for name in ("", DRAFT_GROUP))


def pages_per_sequence(
    group: str, limits: Limits, *, tokens: int, page_size: int, window: int
) -> int:
    """Most pages that a sequence of ``tokens`` tokens holds at once in a group.

    A window keeps itself and the rows of the largest launch, which may start inside a page. Where
    a step is queued behind another one, these rows are its tree, the tokens that either may emit,
    and those that wait for the draft.
    """
    tree = tree_slots(group, limits)
    pages = -(-(tokens + tree) // page_size)
    if window == 0:
        return pages
    held = window - 1 + max(limits.max_rows, tree + 3 * (limits.draft_depth + 1))
    return min(pages, -(-held // page_size) + 1)


def pages_held(group: CacheGroup, limits: Limits, *, tokens: int) -> int:
    """Most pages that a sequence of ``tokens`` tokens holds at once in an engine's group."""
    return pages_per_sequence(
        group.name, limits, tokens=tokens, page_size=group.page_size, window=group.window
    )


def allocators(groups: Sequence[CacheGroup]) -> dict[str, tuple[str, ...]]:
    """The groups whose pages one allocator hands out, by the first of them.

    The target's groups that keep every position hold a sequence's tokens in pages of the same
    numbers, so that one table shows its keys, its latents and its indexers' keys.
    """
    found: dict[object, list[str]] = {}
    for group in groups:
        alone = group.window > 0 or group.name in DRAFT_GROUPS
        key = group.name if alone else (group.page_size, group.pages)
        found.setdefault(key, []).append(group.name)
    return {names[0]: tuple(names) for names in found.values()}


def sequences_together(groups: Sequence[CacheGroup], limits: Limits, tokens: int) -> int:
    """How many sequences that may each reach ``tokens`` tokens can reserve their pages at once."""
    return min(
        limits.max_batch_size,
        *((group.pages - 1) // pages_held(group, limits, tokens=tokens) for group in groups),
    )
