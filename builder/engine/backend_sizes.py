"""The default sizes of a backend, and the limits of its launches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.engine_dir.manifest import DraftShape

# The limits of a tree if only some of its sizes are given.
DEFAULT_TREE_LIMITS = DraftShape(draft_top_k=8, draft_depth=8, draft_tokens=60)
# On a GPU every verified row reads more experts, so chains are short.
SHORT_CHAIN = DraftShape(draft_top_k=1, draft_depth=4, draft_tokens=4)
# Longer runs of forced tokens take several steps. The rows of this chain and its root fill a tile
# of CUDA kernels.
GUIDE_CHAIN = 7
# CUDA kernels are batch-invariant up to this number of rows of a launch.
MAX_DECODE_ROWS = 256


@dataclass(frozen=True)
class BackendSizes:
    """The default sizes of a backend, and its storage of caches.

    ``draft_dtype`` is the default storage of a draft's weights. ``decode_rows`` limits the rows of
    a launch that decodes or verifies, None for no limit; pages are then powers of two, as kernels
    require. ``guide_chain`` is the longest chain of tokens that a guide forces, in engines without
    a drafter on the host. ``one_form``: layers of one kind (with or without a window) must cache
    either latents or keys and values, if SpecPV re-verifies them.
    """

    page_size: int
    draft_limits: DraftShape
    prefill_rows: int
    cache_dtype: str
    pool_axes: tuple[str, ...]
    draft_dtype: Literal["fp32", "bf16"]
    decode_rows: int | None = None
    guide_chain: int = 0
    one_form: bool = False


def holding(shapes: Collection[DraftShape]) -> DraftShape:
    """Return a tree as large as any of these."""
    return DraftShape(
        max((shape.draft_top_k for shape in shapes), default=0),
        max((shape.draft_depth for shape in shapes), default=0),
        max((shape.draft_tokens for shape in shapes), default=0),
    )
