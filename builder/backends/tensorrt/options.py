"""Validates the options of a build with a TensorRT library, and the GPUs to build for."""

from __future__ import annotations

from specbuild.builder.backends.foreign_options import (
    refuse_cpu_options,
    refuse_several_gpus,
)
from specbuild.builder.backends.tensorrt.library import OFFERS, require_library
from specbuild.builder.options import BuildOptions
from specbuild.builder.tensorrt_options import TensorRtOptions
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES

DEFAULT_CAPABILITY = "sm_120"
# TensorRT-RTX engines use bf16, which these GPUs do not support.
_WITHOUT_BF16 = ("sm_75",)


def require_tensorrt_options(options: BuildOptions) -> None:
    """Raise SpecbuildError for an option that the chosen library does not support."""
    set_options = list(options.tensorrt.given())
    offers, title = OFFERS[options.backend], LIBRARIES[options.backend].title
    for name, is_supported, reason in (
        ("timing_cache", offers.timing_cache, "it selects kernels when an engine is loaded"),
        ("version_compatible", offers.version_compatible, "it ships no lean runtime"),
        ("hardware_compatible", offers.hardware_compatible, "use --gpu to list the GPUs"),
    ):
        if name in set_options and not is_supported:
            raise SpecbuildError(
                f"{title} does not support {TensorRtOptions.flag(name)}: {reason}; remove the "
                "option"
            )
    if options.tensorrt.strip_weights and options.tensorrt.weight_streaming:
        raise SpecbuildError(
            "--weight-streaming needs weights in the engine and --strip-weights removes them; "
            "remove one of the options"
        )
    dtype, kernels = options.drafting.dtype, options.kernels
    if dtype not in (None, "bf16"):
        raise SpecbuildError(f"--draft-dtype {dtype} needs --backend cuda; remove the option")
    refuse_cpu_options(options)
    refuse_several_gpus(options)
    if kernels.rounds_to is not None:
        raise SpecbuildError(
            f"--weights-dtype {kernels.rounds_to} needs --backend cuda; remove the option"
        )
    if options.limits.kv_dtype is not None:
        raise SpecbuildError(
            f"--kv-dtype {options.limits.kv_dtype} needs --backend cuda or cpu; remove the option"
        )
    if kernels.prefilter_head:
        raise SpecbuildError("--prefilter-head needs --backend cuda; remove the option")
    if not offers.plugins and kernels.given():
        raise SpecbuildError(
            f"{title} does not run specbuild's kernels: --tactics and --tuned-only need "
            "--backend cuda"
        )


def built_for(options: BuildOptions) -> str:
    """Return the GPUs to build for, comma-separated. SpecbuildError for an unsupported GPU."""
    require_library(options.backend)
    supported = OFFERS[options.backend].capabilities
    if supported is None:
        return options.gpu or ""
    usable = [name for name in supported if name not in _WITHOUT_BF16]
    text = DEFAULT_CAPABILITY if options.gpu is None else options.gpu
    requested = list(dict.fromkeys(text.split(",")))
    for name in requested:
        if name not in usable:
            raise SpecbuildError(
                f"--gpu {text!r}: got {name!r}, but {LIBRARIES[options.backend].title} builds "
                f"engines for {', '.join(usable)}; use one or more of them, separated by commas"
            )
    return ",".join(name for name in usable if name in requested)
