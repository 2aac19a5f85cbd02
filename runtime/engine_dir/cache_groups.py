"""What one sequence takes of each cache group: slots and pages, counted from the limits."""

from __future__ import annotations

from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Limits, SpecPv

FULL_GROUP = "full"
# Full-attention layers that cache latents.
LATENT_GROUP = "latent"
DRAFT_GROUP = "draft"
# Element types of caches, and their bytes; fp8 is of indexers' keys only.
FP8_DTYPE = "float8_e4m3fn"
CACHED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, FP8_DTYPE: 1}


def choosing_group(config: SpecPv) -> str:
    """The cache group whose keys SpecPV chooses blocks by."""
    return INDEXER_GROUP if config.score == "indexer" else FULL_GROUP


def tree_slots(group: str, limits: Limits) -> int:
    """Slots that a tree takes behind the committed tokens: N + 1, in the draft K·(D − 1)."""
    if group == DRAFT_GROUP:
        return limits.draft_top_k * max(limits.draft_depth - 1, 0)
    return limits.draft_tokens + 1


def slots_per_sequence(limits: Limits) -> int:
    """Slots that a sequence of full length needs in any group, its tree included."""
    return limits.max_seq_len + max(tree_slots(name, limits) for name in ("", DRAFT_GROUP))


def pages_per_sequence(
    group: str, limits: Limits, *, tokens: int, page_size: int, window: int
) -> int:
    """Most pages that a sequence of ``tokens`` tokens holds at once in a group.

    A window keeps itself and the rows of the largest launch, which may start inside a page.
    """
    tree = tree_slots(group, limits)
    pages = -(-(tokens + tree) // page_size)
    if window == 0:
        return pages
    held = window - 1 + max(limits.max_rows, tree)
    return min(pages, -(-held // page_size) + 1)
