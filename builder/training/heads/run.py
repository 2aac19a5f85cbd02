"""The loop that trains new heads: stages of steps, the loss curve, and the saved state."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from specbuild.builder.progress import Progress
from specbuild.builder.training.corpus import TrainingText
from specbuild.builder.training.heads.backbone import Backbone
from specbuild.builder.training.heads.estimate import SavedBytes, Trial
from specbuild.builder.training.heads.graphed import GraphedLearning, Learn, may_replay
from specbuild.builder.training.heads.learning import Learning
from specbuild.builder.training.heads.losses import total
from specbuild.builder.training.heads.options import HeadOptions
from specbuild.builder.training.heads.stage import Schedule, Stage
from specbuild.builder.training.heads.workers import Workers
from specbuild.builder.training.objective import Batch
from specbuild.builder.training.run_state import RunFolder
from specbuild.runtime.errors import SpecbuildError

BETAS = (0.9, 0.95)
POINTS = 200  # in the loss curve


@dataclass(frozen=True)
class HeadPoint:
    """Means of the steps since the previous point: the weighted sum, and each term."""

    step: int
    stage: str
    learning_rate: float
    total: float
    terms: dict[str, float]


@dataclass
class HeadRun:
    """The state of one training run. ``step`` counts over all stages.

    ``optimiser`` and ``learn``, which runs a micro batch, are those of the current stage. With
    ``graphs`` a micro batch is one launch.
    """

    options: HeadOptions
    backbone: Backbone
    schedule: Schedule
    text: TrainingText
    workers: Workers
    progress: Progress
    step: int = 0
    points: list[HeadPoint] = field(default_factory=list)
    recent: list[torch.Tensor] = field(default_factory=list)
    optimiser: torch.optim.Optimizer | None = None
    learn: Learn | None = None
    graphs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.graphs = may_replay(self.options, self.workers)


def train(run: HeadRun, folder: RunFolder, started_s: float) -> bool:
    """Take the remaining steps; return False if the time limit stops them.

    With ``finish`` no step is taken.
    """
    options, steps, progress = run.options, run.schedule.steps, run.progress
    if options.finish:
        return True
    progress.start("training", steps, "steps")
    progress.advance(run.step)
    while run.step < steps:
        is_late = options.time_limit_s and time.monotonic() - started_s > options.time_limit_s
        if options.time_limit_s and run.workers.broadcast(is_late):
            _save(run, folder)
            progress.note(f"stopped by the time limit after {run.step} of {steps} steps")
            return False
        stage, within = run.schedule.at(run.step)
        if not within or run.optimiser is None:
            enter(run, stage)
        run.recent.append(_step(run, stage, within))
        run.step += 1
        progress.advance(1)
        if run.step % max(1, steps // POINTS) == 0 or within + 1 == stage.rates.steps:
            _add_point(run, stage, within)
        if run.step % options.save_every == 0 and run.step < steps:
            _save(run, folder)
            if run.points:
                progress.note(f"step {run.step}: loss {run.points[-1].total:.4f}")
    return True


def enter(run: HeadRun, stage: Stage) -> None:
    """Prepare a stage, with an optimiser of its own."""
    _prepare(run, stage)
    on_gpu = run.workers.device.startswith("cuda")
    run.optimiser = torch.optim.AdamW(
        stage.trained(), lr=stage.rates.peak, betas=BETAS, weight_decay=0.0, fused=on_gpu
    )
    run.learn = _make_learn(run, stage)


def _prepare(run: HeadRun, stage: Stage) -> None:
    """Enable gradients of the stage's heads only."""
    leave(run)
    for other in run.schedule.stages:
        other.heads.requires_grad_(False)
    stage.heads.requires_grad_(True)
    stage.enter()


def leave(run: HeadRun) -> None:
    """Free the optimiser and gradients of a stage."""
    run.optimiser = run.learn = None
    for stage in run.schedule.stages:
        stage.heads.zero_grad(set_to_none=True)


def _make_learn(run: HeadRun, stage: Stage) -> Learn:
    learn = Learning(run.options, run.backbone, stage)
    if run.graphs:
        try:
            return GraphedLearning(learn, stage.trained(), _micro_batches(run)[0])
        except RuntimeError as error:
            run.graphs = False
            run.progress.note(f"steps are launched kernel by kernel: {_cause(error)}")
    return learn


def _cause(error: BaseException) -> str:
    """Return the first line of the first error; a failed capture raises an additional one."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).partition("\n")[0]


def trial(run: HeadRun) -> Trial:
    """Measure the first micro batch of the first step, and discard it.

    It runs twice, because the first pass on a device loads kernels. The first pass, kernel by
    kernel, counts the saved bytes. The second, as in training, measures the time.
    """
    stage, _ = run.schedule.at(0)
    _prepare(run, stage)
    parts = _micro_batches(run)
    saved = SavedBytes()
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        Learning(run.options, run.backbone, stage)(parts[0])
    enter(run, stage)
    assert run.learn is not None
    _synchronize(run.workers.device)
    started_s = time.perf_counter()
    run.learn(parts[0])
    _synchronize(run.workers.device)
    step_s = (time.perf_counter() - started_s) * len(parts)
    leave(run)
    return Trial(step_s=step_s, activation_bytes=saved.total)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _step(run: HeadRun, stage: Stage, within: int) -> torch.Tensor:
    optimiser, learn = run.optimiser, run.learn
    assert optimiser is not None and learn is not None
    for group in optimiser.param_groups:
        group["lr"] = stage.rates.rate(within)
    term_sums = torch.zeros(len(stage.losses), device=run.workers.device)
    for part in _micro_batches(run):
        term_sums = term_sums + learn(part)
    run.workers.sum_gradients(stage.trained())
    nn.utils.clip_grad_norm_(stage.trained(), run.options.gradient_clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)  # a graph adds to the tensors of its capture
    return run.workers.summed(term_sums)


def _micro_batches(run: HeadRun) -> list[Batch]:
    """Return this process's rows of the step's batch, split into micro batches."""
    options = run.options
    batch = run.text.batch(run.step, options.batch_size, run.workers.device)
    rank_rows = slice(run.workers.rank, None, run.workers.count)
    ids, counted = batch.ids[rank_rows], batch.counted[rank_rows]
    size = options.micro_batch_size or len(ids)
    return [Batch(*rows) for rows in zip(ids.split(size), counted.split(size), strict=True)]


def _add_point(run: HeadRun, stage: Stage, within: int) -> None:
    means = torch.stack(run.recent).mean(dim=0)
    run.recent.clear()
    weighted = float(total(means, stage.losses))
    if not math.isfinite(weighted):
        raise SpecbuildError(
            f"train: the loss is {weighted} by step {run.step}; lower --learning-rate"
        )
    term_means = dict(zip(stage.losses, means.tolist(), strict=True))
    run.points.append(
        HeadPoint(run.step, stage.name, stage.rates.rate(within), weighted, term_means)
    )


def _save(run: HeadRun, folder: RunFolder) -> None:
    if run.workers.leads:
        folder.save(
            {
                "step": run.step,
                "heads": [stage.heads.state_dict() for stage in run.schedule.stages],
                "optimiser": None if run.optimiser is None else run.optimiser.state_dict(),
                "points": [asdict(point) for point in run.points],
                "recent": [losses.cpu() for losses in run.recent],
            }
        )


def restore(run: HeadRun, state: dict[str, Any] | None) -> None:
    """Continue from a saved state, if there is one."""
    if state is None:
        return
    for stage, heads in zip(run.schedule.stages, state["heads"], strict=True):
        stage.heads.load_state_dict(heads)
    run.step = state["step"]
    run.points = [HeadPoint(**point) for point in state["points"]]
    run.recent = [losses.to(run.workers.device) for losses in state["recent"]]
    stage, within = run.schedule.at(run.step)
    if within and not run.options.finish:
        enter(run, stage)
        assert run.optimiser is not None
        run.optimiser.load_state_dict(state["optimiser"])
