"""Cases of LinearPartial in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.linear.storage import FP8
from specbuild.plugins_cuda.linear_partial.cases import linear_partial

KERNEL_CASES: tuple[Case, ...] = (
    linear_partial(300, 272, 96),
    linear_partial(2048, 2880, 2048, prefix="gpu: "),
    linear_partial(1000, 4096, 7168, prefix="gpu: "),
    linear_partial(300, 2880, 8640, storage=FP8, prefix="gpu: "),
)
