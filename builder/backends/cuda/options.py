"""The options of a build that engines with CUDA kernels take, and the tactics that they name."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.backends.backend import TakenOptions
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
class TakenKernelOptions(TakenOptions):
    """``tactics`` choose among the kernels of ``gpu``; ``tuned_only`` refuses a shape without."""

    gpu: str
    tactics: TacticBook
    tuned_only: bool = False


def taken_options(asked: BuildOptions) -> TakenKernelOptions:
    """SpecbuildError names an option of TensorRT, a GPU without kernels, or a wrong tactic file."""
    refuse_tensorrt_options(asked)
    gpu = supported_gpu(asked.gpu)
    refuse_cpu_options(asked)
    dtype = asked.kernels.rounds_to
    if asked.kernels.prefilter_head and dtype is not None:
        raise SpecbuildError(
            f"--prefilter-head needs a bf16 head; with --weights-dtype {dtype} the head is not "
            "larger than its int8 copy. Omit one of the options"
        )
    return TakenKernelOptions(asked, gpu, gpu, tactics_of(asked, gpu), asked.kernels.tuned_only)


def tactics_of(asked: BuildOptions, gpu: str) -> TacticBook:
    """The tactics of ``--tactics FILE``, or those that are shipped for the GPU."""
    given = asked.kernels.tactics
    return shipped_tactics(gpu) if given is None else given_tactics(given, gpu)
