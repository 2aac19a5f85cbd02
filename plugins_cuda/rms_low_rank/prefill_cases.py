"""Cases of RmsLowRank in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_low_rank.cases import V2_LITE, YOUTU, Sizes, project

KERNEL_CASES: tuple[Case, ...] = (
    project(290, 96, padding=7),
    project(40, 160, Sizes(56, 16, 8, padded=8), rounding="gpt_oss"),
    project(2048, 2048, YOUTU, page_size=64, prefix="gpu: "),
    project(1000, 2048, V2_LITE, page_size=64, padding=24, prefix="gpu: "),
)
