"""The sizes of TensorRT engines of our kernels: those of CUDA engines."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.backends.cuda.sizes import SIZES as CUDA_SIZES

SIZES = replace(CUDA_SIZES, one_form=False)
