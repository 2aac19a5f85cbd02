"""Errors for options that only other backends accept."""

from __future__ import annotations

from specbuild.builder.kernel_options import CpuOptions
from specbuild.builder.options import BuildOptions
from specbuild.builder.tensorrt_options import TensorRtOptions
from specbuild.runtime.errors import SpecbuildError


def refuse_tensorrt_options(requested: BuildOptions) -> None:
    """Raise SpecbuildError for the first option that only TensorRT accepts."""
    for name in requested.tensorrt.given():
        raise SpecbuildError(f"{TensorRtOptions.flag(name)} needs --backend tensorrt")


def refuse_cpu_options(requested: BuildOptions) -> None:
    """Raise SpecbuildError for the first option that only CPU engines accept."""
    for name in requested.cpu.given():
        raise SpecbuildError(f"{CpuOptions.flag(name)} needs --backend cpu")


def refuse_kernel_options(requested: BuildOptions) -> None:
    """Raise SpecbuildError for the first option that only engines with CUDA kernels accept."""
    kernels = requested.kernels
    for name, value in (("gpu", requested.gpu), ("tactics", kernels.tactics)):
        if value is not None:
            raise SpecbuildError(f"--{name} {value} needs --backend cuda")
    refuse_several_gpus(requested)
    if kernels.tuned_only:
        raise SpecbuildError("--tuned-only needs --backend cuda")
    if kernels.prefilter_head:
        raise SpecbuildError("--prefilter-head needs --backend cuda")
    if requested.drafting.dtype is not None:
        raise SpecbuildError(f"--draft-dtype {requested.drafting.dtype} needs --backend cuda")


def refuse_several_gpus(requested: BuildOptions) -> None:
    """Raise SpecbuildError if the engine is to run on several GPUs."""
    if requested.ranks > 1:
        raise SpecbuildError(f"--tensor-parallel {requested.ranks} needs --backend cuda")
