"""The files of a trained draft: config, weights, report and plot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbuild.builder.checkpoint.tensor_file import write_tensors
from specbuild.builder.svg import save_svg
from specbuild.builder.training.evaluation import Acceptance
from specbuild.runtime.engine_dir.strict_json import to_json

REPORT_FILE = "training_report.json"
PLOT_FILE = "training_losses.svg"


@dataclass(frozen=True)
class LossPoint:
    """Mean losses since the previous point: the weighted sum, and those of each draft position."""

    step: int
    learning_rate: float
    total: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class TrainReport:
    """The result of a training; with ``finished`` False its time limit stopped it."""

    finished: bool
    steps: int
    parameters: int
    training_tokens: int
    self_text_rows: int
    vocabulary_coverage: float
    losses: tuple[LossPoint, ...]
    held_out_text: Acceptance | None
    held_out_self_text: Acceptance | None
    options: dict[str, Any]


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", tensors)


def write_report(folder: Path, report: TrainReport) -> None:
    """Write the report and the plot of its losses."""
    write_json(folder / REPORT_FILE, to_json(report))
    plot_losses(folder / PLOT_FILE, report)


def plot_losses(file: Path, report: TrainReport) -> None:
    """Plot losses by position, and acceptance if it was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [point.step for point in report.losses]
    for position in range(len(report.losses[0].per_position)):
        values = [point.per_position[position] for point in report.losses]
        left.plot(steps, values, label=f"step {position}")
    left.set(xlabel="training step", ylabel="loss", title="Loss by draft position")
    left.legend()
    acceptances = {"text": report.held_out_text, "generated text": report.held_out_self_text}
    for name, acceptance in acceptances.items():
        if acceptance is not None:
            length = f"{acceptance.mean_acceptance_length:.2f}"
            label = f"{name}: length {length}, chain of {acceptance.chain}"
            right.plot(range(len(acceptance.agreement)), acceptance.agreement, "o-", label=label)
    right.set(xlabel="draft position", ylabel="agreement", title="Held out", ylim=(0, 1))
    if right.lines:
        right.legend()
    save_svg(figure, file)


def write_json(file: Path, content: Any) -> None:
    """Write indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
