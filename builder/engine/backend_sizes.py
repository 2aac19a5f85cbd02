"""The sizes that a backend chooses, and the bounds of its launches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.engine_dir.manifest import DraftShape

# What a tree may grow to where only some of its sizes are asked for.
DEFAULT_TREE_LIMITS = DraftShape(draft_top_k=8, draft_depth=8, draft_tokens=60)
# On a GPU every verified row reads more experts: short chains.
SHORT_CHAIN = DraftShape(draft_top_k=1, draft_depth=4, draft_tokens=4)
# Rows of a launch up to which CUDA kernels are batch-invariant.
MAX_DECODE_ROWS = 256


@dataclass(frozen=True)
class BackendSizes:
    """What a backend chooses where nothing is asked for, and how it keeps its caches.

    ``draft_dtype`` is how it stores a draft's weights unless it is asked otherwise.

    ``decode_rows`` bounds the rows of a launch that decodes or verifies, None where nothing does;
    pages are then powers of two, as kernels take them. ``one_form``: layers of one kind (with a
    window, without) cache either latents or keys and values, where SpecPV re-verifies them.
    """

    page_size: int
    draft_limits: DraftShape
    prefill_rows: int
    cache_dtype: str
    pool_axes: tuple[str, ...]
    draft_dtype: Literal["fp32", "bf16"]
    decode_rows: int | None = None
    one_form: bool = False


def holding(shapes: Collection[DraftShape]) -> DraftShape:
    """A tree as large as any of these."""
    return DraftShape(
        max((shape.draft_top_k for shape in shapes), default=0),
        max((shape.draft_depth for shape in shapes), default=0),
        max((shape.draft_tokens for shape in shapes), default=0),
    )
