"""The options of builds with CUDA kernels, and the tactics that they select."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.backends.backend import BackendOptions
from specbuild.builder.backends.cuda.gpus import supported_gpu
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    TacticBook,
    shipped_tactics,
    tactics_from_file,
)
from specbuild.builder.backends.foreign_options import refuse_cpu_options, refuse_tensorrt_options
from specbuild.builder.options import BuildOptions
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class KernelBackendOptions(BackendOptions):
    """``tactics`` select among the kernels of ``gpu``; ``tuned_only`` requires one per shape."""

    gpu: str
    tactics: TacticBook
    tuned_only: bool = False


def kernel_backend_options(requested: BuildOptions) -> KernelBackendOptions:
    """Validate the options. SpecbuildError for an invalid option, GPU or tactic file."""
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
    """Return the tactics of ``--tactics FILE``, or those shipped for the GPU."""
    path = requested.kernels.tactics
    return shipped_tactics(gpu) if path is None else tactics_from_file(path, gpu)
