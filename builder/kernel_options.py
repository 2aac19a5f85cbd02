"""How an engine stores and multiplies weights: options of CUDA kernels and of CPU products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup


@dataclass(frozen=True, kw_only=True)
class KernelOptions(OptionGroup):
    """The storage of weights, and the variants of CUDA kernels in an engine."""

    PANEL: ClassVar[str] = "Weights and kernels"

    tactics: Annotated[
        Path | None,
        Described(
            "Tactic file written by tune, instead of the included one (CUDA).",
            "FILE",
            recorded=False,
        ),
    ] = None
    weights_dtype: Annotated[
        Literal["checkpoint", "bf16", "fp8", "mxfp4"] | None,
        Described(
            "Storage type of the model's projections and head: checkpoint, bf16, fp8 or mxfp4. "
            "checkpoint keeps the quantized values of a quantized checkpoint where the engine can "
            "compute with them. bf16 dequantizes all of them, on a CPU to fp32. fp8 and mxfp4 "
            "(lossy) quantize the weights of a CUDA engine; a CPU engine rounds them but does not "
            "get smaller.",
            "TYPE",
            shown="checkpoint",
        ),
    ] = None
    prefilter_head: Annotated[
        bool,
        Described("Preselect tokens with an int8 copy of the head: same tokens, faster (CUDA)."),
    ] = False
    tuned_only: Annotated[
        bool,
        Described(
            "Refuse shapes for which the tactic file has no measurement (CUDA).", recorded=False
        ),
    ] = False

    @property
    def rounds_to(self) -> str | None:
        """The type to which weights are rounded, None if they keep their values."""
        return self.weights_dtype if self.weights_dtype in ("fp8", "mxfp4") else None


@dataclass(frozen=True, kw_only=True)
class CpuOptions(OptionGroup):
    """The computation of a CPU engine with quantized weights."""

    PREFIX: ClassVar[str] = "cpu"
    PANEL: ClassVar[str] = "CPU"

    math: Annotated[
        Literal["fast", "exact"] | None,
        Described(
            "Products with quantized weights: fast rounds activations to int8 per block; exact "
            "splits them into two int8 rows (error as in fp32, slower).",
            "MATH",
            usual="fast",
        ),
    ] = None
