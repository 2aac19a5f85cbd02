"""Cases of AbsorbQuery in prefill."""

from __future__ import annotations

from specbuild.plugins_cuda.absorb_query.cases import GLM, V3, YOUTU, Sizes, absorb
from specbuild.plugins_cuda.cases import Case

KERNEL_CASES: tuple[Case, ...] = (
    absorb(290, Sizes(2, 64, 16, 288), padding=7),
    absorb(2048, YOUTU, prefix="gpu: "),
    absorb(1000, GLM, padding=24, prefix="gpu: "),
    absorb(512, V3, prefix="gpu: "),
)
