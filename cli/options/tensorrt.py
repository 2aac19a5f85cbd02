"""Options of ``build`` for TensorRT engines, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TimingCache = Annotated[
    Path | None,
    typer.Option(
        "--timing-cache",
        metavar="FILE",
        help="Kernel timings to start from and to add to, with --backend tensorrt.",
    ),
]
VersionCompatible = Annotated[
    bool,
    typer.Option("--version-compatible", help="Let later versions of TensorRT run the engine."),
]
HardwareCompatible = Annotated[
    bool,
    typer.Option(
        "--hardware-compatible",
        help="Let every GPU of the same compute capability run the TensorRT engine.",
    ),
]
WeightStreaming = Annotated[
    bool,
    typer.Option(
        "--weight-streaming",
        help="Let a TensorRT engine keep weights in host memory while it runs.",
    ),
]
StripWeights = Annotated[
    bool,
    typer.Option(
        "--strip-weights",
        help="Keep the weights out of TensorRT's engines: they stay in weights.safetensors.",
    ),
]
