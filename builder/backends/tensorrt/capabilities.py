"""What TensorRT engines can be built for, and of: refused here, before any work."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.builder.backends.tensorrt.library import OFFERS, require_library
from specbuild.builder.backends.tensorrt.standard.ops import FP4, INT8, ExpertStorage
from specbuild.builder.options import BuildOptions, TensorRtOptions
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES

DEFAULT_CAPABILITY = "sm_120"
# Engines of TensorRT-RTX hold bf16, which older GPUs lack.
_WITHOUT_BF16 = ("sm_75",)
_WITH_E2M1 = ("sm_120", "sm_121")


def require_tensorrt_options(options: BuildOptions) -> None:
    """SpecbuildError where an option is not the chosen backend's."""
    given = list(options.tensorrt.given())
    if not facts_of(options.backend).has_engines:
        if given:
            raise SpecbuildError(f"{TensorRtOptions.flag(given[0])} needs --backend tensorrt")
        return
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
    if not offers.plugins and kernels.given():
        raise SpecbuildError(
            f"{title} takes no kernels of ours: --tactics and --tuned-only need another backend"
        )


def tensorrt_device(options: BuildOptions) -> str:
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


def require_standard_support(target: TargetGeometry, options: BuildOptions) -> None:
    """SpecbuildError naming what a target or build has that no engine of standard ops computes."""
    title = LIBRARIES["tensorrt-rtx"].title
    if target.mla is not None:
        raise SpecbuildError(
            f"the model is a {target.model_type}, whose attention (MLA) is built for the CPU only; "
            "build with --backend cpu"
        )
    if target.indexer is not None:
        raise SpecbuildError(
            f"--dsa has no form for {title}; build with --backend cpu or cuda, or with --no-dsa"
        )
    if options.specpv.enabled:
        raise SpecbuildError(
            f"--specpv has no form for {title}; build with --backend cpu or cuda, or without it"
        )


def expert_storage(capabilities: Sequence[str]) -> ExpertStorage:
    """Four bits where every GPU has e2m1, else eight; both hold MXFP4 exactly."""
    return FP4 if set(capabilities) <= set(_WITH_E2M1) else INT8
