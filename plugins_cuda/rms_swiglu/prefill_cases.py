"""Cases of RmsSwiglu in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_swiglu.cases import swiglu

KERNEL_CASES: tuple[Case, ...] = (
    swiglu(270, 96, 136),
    swiglu(140, 96, 72, bias=True),
    swiglu(80, 96, 72, norm=False, activation="geglu_tanh"),
    swiglu(2048, 2880, 17280, prefix="gpu: "),
)
