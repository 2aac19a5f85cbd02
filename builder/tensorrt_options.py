"""What a build is asked for that only TensorRT engines know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup


@dataclass(frozen=True, kw_only=True)
class TensorRtOptions(OptionGroup):
    """Timings to build with, and what the library is asked for."""

    PANEL: ClassVar[str] = "TensorRT"

    timing_cache: Annotated[
        Path | None,
        Described(
            "Kernel timings to begin with and to add to; not for RTX.", "FILE", recorded=False
        ),
    ] = None
    version_compatible: Annotated[
        bool, Described("Let later versions of TensorRT run the engine.")
    ] = False
    hardware_compatible: Annotated[
        bool, Described("Let every GPU of the same compute capability run the TensorRT engine.")
    ] = False
    weight_streaming: Annotated[
        bool, Described("Let a TensorRT engine keep weights in host memory while it runs.")
    ] = False
    strip_weights: Annotated[
        bool,
        Described("Keep the weights out of TensorRT's engines: they stay in weights.safetensors."),
    ] = False
