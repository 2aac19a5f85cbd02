"""The options of a build that a TensorRT library takes, and the GPUs that it builds for."""

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
# Engines of TensorRT-RTX hold bf16, which older GPUs lack.
_WITHOUT_BF16 = ("sm_75",)


def require_tensorrt_options(options: BuildOptions) -> None:
    """SpecbuildError names an option that the chosen library does not take."""
    given = list(options.tensorrt.given())
    offers, title = OFFERS[options.backend], LIBRARIES[options.backend].title
    for name, offered, why in (
        ("timing_cache", offers.timing_cache, "it chooses kernels when an engine is loaded"),
        ("version_compatible", offers.version_compatible, "it ships no lean runtime"),
        ("hardware_compatible", offers.hardware_compatible, "--gpu lists what its engines run on"),
    ):
        if name in given and not offered:
            raise SpecbuildError(
                f"{title} does not know {TensorRtOptions.flag(name)}: {why}; leave it out"
            )
    if options.tensorrt.strip_weights and options.tensorrt.weight_streaming:
        raise SpecbuildError(
            "--weight-streaming is for weights inside an engine, --strip-weights leaves none "
            "there; leave one of them out"
        )
    dtype, kernels = options.drafting.dtype, options.kernels
    if dtype not in (None, "bf16"):
        raise SpecbuildError(f"--draft-dtype {dtype} needs --backend cuda; leave it out")
    refuse_cpu_options(options)
    refuse_several_gpus(options)
    if kernels.rounds_to is not None:
        raise SpecbuildError(
            f"--weights-dtype {kernels.rounds_to} needs --backend cuda; leave it out"
        )
    if options.limits.kv_dtype is not None:
        raise SpecbuildError(
            f"--kv-dtype {options.limits.kv_dtype} needs --backend cuda or cpu; leave it out"
        )
    if kernels.prefilter_head:
        raise SpecbuildError("--prefilter-head needs --backend cuda; leave it out")
    if not offers.plugins and kernels.given():
        raise SpecbuildError(
            f"{title} takes no kernels of ours: --tactics and --tuned-only need another backend"
        )


def built_for(options: BuildOptions) -> str:
    """The GPUs to build for, comma-separated. SpecbuildError where one cannot be built for."""
    require_library(options.backend)
    known = OFFERS[options.backend].capabilities
    if known is None:
        return options.gpu or ""
    usable = [name for name in known if name not in _WITHOUT_BF16]
    given = DEFAULT_CAPABILITY if options.gpu is None else options.gpu
    asked = list(dict.fromkeys(given.split(",")))
    for name in asked:
        if name not in usable:
            raise SpecbuildError(
                f"--gpu {given!r} names {name!r}: {LIBRARIES[options.backend].title} builds these "
                f"engines for {', '.join(usable)}; name one or more of them, separated by commas"
            )
    return ",".join(name for name in usable if name in asked)
