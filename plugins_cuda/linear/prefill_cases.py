"""Cases of Linear in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.linear.cases import linear
from specbuild.plugins_cuda.linear.storage import FP8, MXFP4

KERNEL_CASES: tuple[Case, ...] = (
    linear(300, 272, 96, bias=True, residual=True),
    linear(80, 144, 96, residual=True, scale=0.22),
    linear(2048, 2880, 4096, bias=True, residual=True, prefix="gpu: "),
    linear(1000, 2880, 4096, bias=True, residual=True, prefix="gpu: "),
    linear(2048, 2880, 17280, residual=True, prefix="gpu: "),
    linear(2048, 2880, 8640, prefix="gpu: "),
    *(linear(1000, 2880, 8640, storage=form, prefix="gpu: ") for form in (MXFP4, FP8)),
    *(
        linear(300, 2880, 17280, residual=True, storage=form, prefix="gpu: ")
        for form in (MXFP4, FP8)
    ),
)
