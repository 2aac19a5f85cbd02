"""Small CPU engines for tests of SpecPV and DSA, whose prompts need partial views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.manifest import DraftShape

SPECPV = {
    "specpv": True,
    "specpv_block_size": 8,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 12,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 40,
    "specpv_partial_threshold": 24,
    "specpv_full_refresh_interval": 30,
}
SHAPES = [None, DraftShape(1, 3, 3), DraftShape(2, 3, 6)]


def built(checkpoints: Path, name: str, model: str = "t", **changes: Any) -> Path:
    """Build the engine ``name`` of a target and the draft ``d`` in ``checkpoints`` once."""
    output = checkpoints / name
    if not output.exists():
        options = BuildOptions.from_flat(
            model=checkpoints / model,
            draft=checkpoints / "d",
            output=output,
            max_seq_len=192,
            max_batch_size=3,
            page_size=4,
            draft_top_k=2,
            draft_depth=3,
            draft_tokens=6,
            **changes,
        )
        build(options, SilentProgress())
    return output
