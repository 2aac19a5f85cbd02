"""Cases of RmsIndexer in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_indexer.cases import REAL, index

KERNEL_CASES: tuple[Case, ...] = (
    index(150, 96, padding=7),
    index(2048, 2880, REAL, page_size=64, prefix="gpu: "),
    index(1000, 2880, REAL, page_size=64, padding=24, prefix="gpu: "),
)
