"""What configurations of synthetic models share, as the releases spell it."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.engine_dir.manifest import Rope, TargetGeometry


def generation_config(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
    """Where the list of EOS tokens stands."""
    return {
        "do_sample": False,
        "eos_token_id": list(g.eos_token_ids),
        "pad_token_id": pad_token_id,
    }


def yarn_config(rope: Rope) -> dict[str, Any]:
    """``rope_scaling`` of a YaRN."""
    return {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "rope_type": "yarn",
        "truncate": rope.truncate,
    }
