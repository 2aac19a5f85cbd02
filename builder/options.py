"""What a build is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbuild.runtime.engine_dir.backends import BackendName


@dataclass(frozen=True)
class BuildOptions:
    """Options of ``specbuild build``; None leaves a choice to the builder."""

    model: Path
    output: Path
    draft: Path | None = None
    backend: BackendName = "cpu"
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
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False
    strip_weights: bool = False
    enable_specpv: bool = False
    specpv_block_size: int | None = None
    specpv_n_sink_blocks: int | None = None
    specpv_n_retrieval_blocks: int | None = None
    specpv_n_window_blocks: int | None = None
    specpv_n_spec_tokens_buf: int | None = None
    specpv_partial_threshold: int | None = None
    specpv_full_refresh_interval: int | None = None
    specpv_reduction: Literal["mean", "max", "last"] | None = None
    specpv_score: Literal["dot", "quest", "indexer"] | None = None
    keep_onnx: bool = False
    dump_passes: Path | None = None
    no_mla: bool = False
    dsa: bool | None = None
    dsa_top_k: int | None = None
    dsa_threshold: int | None = None
    dsa_first_tokens: int | None = None
    dsa_recent_tokens: int | None = None
    dsa_min_agreement: float | None = None
    dsa_check_interval: int | None = None
    dsa_key_dtype: Literal["bf16", "fp8"] | None = None
    strict: bool = False
    force: bool = False
