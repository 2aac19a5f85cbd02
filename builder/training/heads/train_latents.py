"""``specbuild train mla``: trains a retrofit's latents to preserve the model's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from specbuild.builder.checkpoint.latents import (
    LATENT_FILE,
    OUTPUT,
    latent_name,
    read_latent_file,
)
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.checkpoint.tensor_file import write_tensors
from specbuild.builder.families.checkpoints import read_retrofit_target
from specbuild.builder.progress import Progress
from specbuild.builder.training.heads.latents import LatentHeads
from specbuild.builder.training.heads.options import LatentTraining
from specbuild.builder.training.heads.output import HeadReport
from specbuild.builder.training.heads.session import Judge, Session, require_hidden_layers
from specbuild.builder.training.heads.stage import Schedule, Stage
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.builder.training.run_state import INITIAL_FILE
from specbuild.builder.training.schedule import LearningRateSchedule


def train_latents(options: LatentTraining, progress: Progress) -> HeadReport:
    """Train latents and write ``options.output``: the file, a report and a plot of the losses.

    A run that its time limit stops writes no output; the same options with ``resume`` continue it.

    Raises:
        SpecbuildError: options, text, model or latents are invalid, the output exists, or the loss
            diverges.
    """
    started_s = time.monotonic()
    target = read_retrofit_target(options.model, command="train mla", mla=False)
    require_hidden_layers(options, target)
    with Session.open(options, progress) as session:
        tensors = _initial(options, target, session)
        backbone = session.backbone(checkpointing=options.checkpointing)
        heads = LatentHeads(
            backbone,
            tensors,
            plain_outputs(target),
            lora_rank=options.lora_rank,
            seed=options.seed,
        )
        rates = LearningRateSchedule(options.steps, options.learning_rate, options.warmup_fraction)
        schedule = Schedule((Stage("latents", rates, dict(options.losses), heads),))

        def write(folder: Path) -> None:
            stored = heads.tensors(getattr(torch, options.stored_dtype))
            write_tensors(folder / LATENT_FILE, stored)

        judge = Judge(
            before=lambda measure: {"model": measure(heads=False), "before": measure(heads=True)},
            after=lambda measure: {"after": measure(heads=True)},
        )
        return session.trained(backbone, schedule, judge, write, started_s)


def plain_outputs(target: TargetCheckpoint) -> Callable[[int], torch.Tensor]:
    """Return a function that loads the checkpoint's ``o_proj.weight`` of a layer."""
    return lambda layer: target.tensors[latent_name(layer, OUTPUT)].load()


def _initial(
    options: LatentTraining, target: TargetCheckpoint, session: Session
) -> dict[str, torch.Tensor]:
    """Return the initial latents; without a file the first process computes them."""
    file = options.initial or session.folder.path / INITIAL_FILE
    if options.initial is None and session.workers.leads and not file.exists():
        assert options.rank is not None
        latent_options = LatentOptions(
            model=options.model,
            rank=options.rank,
            calibration=options.texts,
            layers=options.layers,
            sequence_length=options.sequence_length,
            output=file,
        )
        retrofit_mla(latent_options, session.progress)
    session.workers.wait()
    read_latent_file(file, target.geometry)
    return load_file(file)
