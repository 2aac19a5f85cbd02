"""Options that another backend than the chosen one takes."""

from __future__ import annotations

from specbuild.builder.kernel_options import CpuOptions
from specbuild.builder.options import BuildOptions
from specbuild.builder.tensorrt_options import TensorRtOptions
from specbuild.runtime.errors import SpecbuildError


def refuse_tensorrt_options(asked: BuildOptions) -> None:
    """SpecbuildError names the first option that only TensorRT knows."""
    for name in asked.tensorrt.given():
        raise SpecbuildError(f"{TensorRtOptions.flag(name)} needs --backend tensorrt")


def refuse_cpu_options(asked: BuildOptions) -> None:
    """SpecbuildError names the first option that only CPU engines take."""
    for name in asked.cpu.given():
        raise SpecbuildError(f"{CpuOptions.flag(name)} needs --backend cpu")


def refuse_kernel_options(asked: BuildOptions) -> None:
    """SpecbuildError names the first option that only engines with CUDA kernels take."""
    kernels = asked.kernels
    for name, given in (("gpu", asked.gpu), ("tactics", kernels.tactics)):
        if given is not None:
            raise SpecbuildError(f"--{name} {given} needs --backend cuda")
    refuse_several_gpus(asked)
    if kernels.tuned_only:
        raise SpecbuildError("--tuned-only needs --backend cuda")
    if kernels.prefilter_head:
        raise SpecbuildError("--prefilter-head needs --backend cuda")
    if asked.drafting.dtype is not None:
        raise SpecbuildError(f"--draft-dtype {asked.drafting.dtype} needs --backend cuda")


def refuse_several_gpus(asked: BuildOptions) -> None:
    """SpecbuildError where one engine is to run on several GPUs."""
    if asked.ranks > 1:
        raise SpecbuildError(f"--tensor-parallel {asked.ranks} needs --backend cuda")
