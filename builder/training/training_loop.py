"""The loop of draft training: steps, the loss curve, and the saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specbuild.builder.progress import Progress
from specbuild.builder.training.config import TrainOptions
from specbuild.builder.training.corpus import TrainingText
from specbuild.builder.training.draft_layers import TrainableDraft
from specbuild.builder.training.frozen_target import FrozenTarget
from specbuild.builder.training.objective import Objective
from specbuild.builder.training.output import LossPoint
from specbuild.builder.training.run_state import RunFolder
from specbuild.builder.training.schedule import LearningRateSchedule
from specbuild.runtime.errors import SpecbuildError

POINTS = 200  # in the loss curve


@dataclass
class TrainingRun:
    """The state of one training run."""

    options: TrainOptions
    draft: TrainableDraft
    optimiser: torch.optim.Optimizer
    target: FrozenTarget
    objective: Objective
    text: TrainingText
    autocast: Callable[[], AbstractContextManager[object]]
    step: int = 0
    points: list[LossPoint] = field(default_factory=list)
    recent: list[torch.Tensor] = field(default_factory=list)


def train(run: TrainingRun, folder: RunFolder, progress: Progress, started_s: float) -> bool:
    """Take the remaining steps; return False if the time limit stops them."""
    options = run.options
    progress.start("draft training", options.steps, "steps")
    progress.advance(run.step)
    point_interval = max(1, options.steps // POINTS)
    while run.step < options.steps:
        if options.time_limit_s and time.monotonic() - started_s > options.time_limit_s:
            folder.save(_state(run))
            progress.note(f"stopped by the time limit after {run.step} of {options.steps} steps")
            return False
        run.recent.append(_step(run))
        run.step += 1
        progress.advance(1)
        if run.step % point_interval == 0 or run.step == options.steps:
            _add_point(run)
        if run.step % options.save_every == 0 and run.step < options.steps:
            folder.save(_state(run))
            if run.points:
                progress.note(f"step {run.step}: loss {run.points[-1].total:.3f}")
    return True


def _step(run: TrainingRun) -> torch.Tensor:
    options = run.options
    for group in run.optimiser.param_groups:
        group["lr"] = learning_rate(run.step, options)
    batch = run.text.batch(run.step, options.batch_size, options.device)
    with run.autocast():
        teacher = run.target.teach(batch.ids)
        predictions = run.objective.predict(run.draft, batch, teacher, _random(run))
        losses = run.objective.losses(predictions, batch, teacher)
    run.objective.total(losses).backward()
    torch.nn.utils.clip_grad_norm_(run.draft.parameters(), options.gradient_clip)
    run.optimiser.step()
    run.optimiser.zero_grad(set_to_none=True)
    return losses.detach()


def _random(run: TrainingRun) -> torch.Generator:
    """Return the generator of a step. It depends on (seed, step) only, so training can resume."""
    return torch.Generator().manual_seed(run.options.seed * run.options.steps + run.step)


def learning_rate(step: int, options: TrainOptions) -> float:
    """Return the learning rate of ``step``."""
    return LearningRateSchedule(options.steps, options.learning_rate, options.warmup_fraction).rate(
        step
    )


def _add_point(run: TrainingRun) -> None:
    losses = torch.stack(run.recent).mean(dim=0)
    run.recent.clear()
    total = float(run.objective.total(losses))
    if not math.isfinite(total):
        raise SpecbuildError(
            f"train draft: the loss is {total} by step {run.step}; lower learning_rate"
        )
    rate = learning_rate(run.step - 1, run.options)
    run.points.append(LossPoint(run.step, rate, total, tuple(losses.tolist())))


def _state(run: TrainingRun) -> dict[str, Any]:
    return {
        "step": run.step,
        "draft": run.draft.state_dict(),
        "optimiser": run.optimiser.state_dict(),
        "points": [asdict(point) for point in run.points],
        "recent": run.recent,
    }


def restore(run: TrainingRun, state: dict[str, Any] | None) -> None:
    """Continue from a saved state, if there is one."""
    if state is None:
        return
    run.draft.load_state_dict(state["draft"])
    run.optimiser.load_state_dict(state["optimiser"])
    run.step = state["step"]
    run.points = [LossPoint(**point) for point in state["points"]]
    run.recent = [losses.to(run.options.device) for losses in state["recent"]]
