"""Cases of RmsQueryLatent in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_query_latent.cases import _GPT_OSS, project

KERNEL_CASES: tuple[Case, ...] = (
    project(290, 96, padding=7),
    project(2048, 2880, _GPT_OSS, page_size=64, prefix="gpu: "),
    project(1000, 2880, _GPT_OSS, page_size=64, padding=24, prefix="gpu: "),
)
