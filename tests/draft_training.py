"""Options of short draft trainings for a tiny target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.builder.training.config import TrainOptions


def make_options(model: Path, text: Path, output: Path, **changes: Any) -> TrainOptions:
    """Return the options of a draft that learns a counting text in 40 steps."""
    values: dict[str, Any] = {
        "steps": 40,
        "batch_size": 4,
        "sequence_length": 24,
        "learning_rate": 2e-3,
        "ttt_steps": 3,
        "draft_vocab": 48,
        "inner": 32,
        "held_out_fraction": 0.1,
        "held_out_rows": 4,
        "save_every": 7,
    }
    return TrainOptions(model=model, texts=(text,), output=output, **(values | changes))
