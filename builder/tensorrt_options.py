"""The options of a build for TensorRT engines only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup


@dataclass(frozen=True, kw_only=True)
class TensorRtOptions(OptionGroup):
    """Timing caches, and settings of the library."""

    PANEL: ClassVar[str] = "TensorRT"

    timing_cache: Annotated[
        Path | None,
        Described(
            "Timing cache of TensorRT, read and extended; not for TensorRT-RTX.",
            "FILE",
            recorded=False,
        ),
    ] = None
    version_compatible: Annotated[
        bool, Described("Allow later versions of TensorRT to run the engine.")
    ] = False
    hardware_compatible: Annotated[
        bool, Described("Allow all GPUs of the same compute capability to run the TensorRT engine.")
    ] = False
    weight_streaming: Annotated[
        bool, Described("Allow a TensorRT-RTX engine to keep weights in host memory at run time.")
    ] = False
    strip_weights: Annotated[
        bool,
        Described("Store weights once in weights.safetensors instead of in TensorRT's engines."),
    ] = False
