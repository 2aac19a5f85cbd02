"""Options of every training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated

TEXT, OPTIMISATION, RUN = "Text", "Optimisation", "Run"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """``texts`` and ``held_out`` are files or directories (``.py .txt .md .jsonl .npy``).

    Without ``held_out`` the share ``held_out_fraction`` of the documents is held out.
    ``time_limit_s`` stops the run early; ``resume`` continues it.
    """

    PANEL: ClassVar[str] = "Model"

    model: Annotated[
        Path,
        Described("Checkpoint directory of the target, or its GGUF file.", "PATH", panel="Model"),
    ]
    output: Annotated[Path, Described("Directory to write.", "DIR", panel="Model")]
    texts: Annotated[
        tuple[Path, ...],
        Described(
            "Training text, a file or directory; repeatable.",
            "PATH",
            name="text",
            panel=TEXT,
            typed=list[Path],
            read=repeated,
        ),
    ]
    held_out: Annotated[
        tuple[Path, ...],
        Described(
            "Evaluation text; repeatable.",
            "PATH",
            panel=TEXT,
            shown="a part of the training text",
            typed=list[Path],
            read=repeated,
        ),
    ] = ()
    held_out_fraction: float = 0.02
    held_out_rows: int = 64
    sequence_length: Annotated[int, Described("Tokens per sequence.", "N", least=2, panel=TEXT)] = (
        512
    )
    steps: Annotated[int, Described("Optimiser steps.", "N", least=1, panel=OPTIMISATION)] = 1000
    batch_size: Annotated[
        int,
        Described("Sequences per step, over all devices.", "N", least=1, panel=OPTIMISATION),
    ] = 8
    learning_rate: Annotated[float, Described("Peak learning rate.", "X", panel=OPTIMISATION)] = (
        4e-4
    )
    warmup_fraction: float = 0.03
    device: Annotated[
        Literal["cpu", "cuda"],
        Described("Training device: cpu or cuda.", "NAME", panel=RUN),
    ] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Described("Compute type: float32 or bfloat16.", "TYPE", panel=RUN),
    ] = "float32"
    seed: Annotated[int, Described("Random seed.", "S", least=0, panel=RUN)] = 0
    save_every: Annotated[int, Described("Steps between two saves.", "N", least=1, panel=RUN)] = 200
    resume: Annotated[bool, Described("Continue from the last save.", panel=RUN)] = False
    time_limit_s: Annotated[
        float | None,
        Described(
            "Stop after this time in seconds; --resume continues.", "X", panel=RUN, shown="none"
        ),
    ] = None
