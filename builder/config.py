"""What a build is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class BuildOptions:
    """Options of ``specbuild build``; None leaves a choice to the builder."""

    model: Path
    output: Path
    draft: Path | None = None
    backend: Literal["cpu", "cuda"] = "cpu"
    gpu: str | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None
    page_size: int | None = None
    draft_top_k: int | None = None
    draft_depth: int | None = None
    draft_tokens: int | None = None
    draft_window: int | None = None
    draft_dtype: Literal["bf16", "fp8", "mxfp4"] | None = None
    tactics: Path | None = None
    tuned_only: bool = False
    keep_onnx: bool = False
    dump_passes: Path | None = None
    no_mla: bool = False
    strict: bool = False
    force: bool = False
