"""The heads of a synthetic draft with plain attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry


@dataclass(frozen=True)
class DraftHeads:
    """Query and KV heads of one width, and their RoPE."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope


def draft_heads(target: TargetGeometry) -> DraftHeads:
    """Return the target's heads. A draft of a target with MLA has plain ones of 128."""
    if target.mla is None:
        whole = replace(target.rope, width=None)
        return DraftHeads(target.q_heads, target.kv_heads, target.head_dim, whole)
    q_heads = max(1, target.hidden // 128)
    return DraftHeads(q_heads, max(1, q_heads // 4), 128, Rope(10000.0))
