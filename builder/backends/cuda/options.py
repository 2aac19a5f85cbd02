"""The options of a build that engines with CUDA kernels take, and the tactics that they name."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.backends.backend import BackendOptions
from specbuild.builder.backends.cuda.gpus import supported_gpu
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    TacticBook,
    given_tactics,
    shipped_tactics,
)
from specbuild.builder.backends.foreign_options import refuse_cpu_options, refuse_tensorrt_options
from specbuild.builder.options import BuildOptions
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class KernelBackendOptions(BackendOptions):
    """``tactics`` choose among the kernels of ``gpu``; ``tuned_only`` refuses a shape without."""

    gpu: str
    tactics: TacticBook
    tuned_only: bool = False


def kernel_backend_options(requested: BuildOptions) -> KernelBackendOptions:
    """SpecbuildError names an option of TensorRT, a GPU without kernels, or a wrong tactic file."""
    refuse_tensorrt_options(requested)
    gpu = supported_gpu(requested.gpu)
    refuse_cpu_options(requested)
    dtype = requested.kernels.rounds_to
    if requested.kernels.prefilter_head and dtype is not None:
        raise SpecbuildError(
            f"--prefilter-head needs a bf16 head; with --weights-dtype {dtype} the head is not "
            "larger than its int8 copy. Omit one of the options"
        )
    return KernelBackendOptions(
        requested, gpu, gpu, tactics_of(requested, gpu), requested.kernels.tuned_only
    )


def tactics_of(requested: BuildOptions, gpu: str) -> TacticBook:
    """The tactics of ``--tactics FILE``, or those that are shipped for the GPU."""
    given = requested.kernels.tactics
    return shipped_tactics(gpu) if given is None else given_tactics(given, gpu)
