"""``specbuild train dsa``: indexers that predict attention, alone and then beside latents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from specbuild.builder.checkpoint.indexers import INDEXER_FILE
from specbuild.builder.checkpoint.latents import LATENT_FILE
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.checkpoint.tensor_file import write_tensors
from specbuild.builder.families.checkpoints import read_retrofit_target, read_target
from specbuild.builder.progress import Progress
from specbuild.builder.training.heads.indexers import (
    IndexerHeads,
    IndexerShape,
    Mode,
    SparsePattern,
)
from specbuild.builder.training.heads.latents import LatentHeads
from specbuild.builder.training.heads.options import IndexerTraining, Losses
from specbuild.builder.training.heads.output import HeadReport
from specbuild.builder.training.heads.session import Judge, Measure, Session, require_hidden_layers
from specbuild.builder.training.heads.stage import Schedule, Stage
from specbuild.builder.training.heads.terms import ATTENTION_KL
from specbuild.builder.training.heads.train_latents import plain_outputs
from specbuild.builder.training.retrofit.layer_list import parse_layers
from specbuild.builder.training.schedule import LearningRateSchedule
from specbuild.runtime.errors import SpecbuildError


def train_indexers(options: IndexerTraining, progress: Progress) -> HeadReport:
    """Trains indexers and writes ``options.output``: their file, a report and a plot of the losses.

    After joint training the latents are written beside them. Ended by its time limit, it writes no
    output; the same options with ``resume`` go on.

    Raises:
        SpecbuildError: options, text or model do not do, the output exists, or the loss diverges.
    """
    started_s = time.monotonic()
    target = read_retrofit_target(options.model, command="train dsa", mla=options.mla)
    require_hidden_layers(options, target)
    layers = _layers(options, target)
    latent = target.geometry.latent_dims != ()
    if options.joint_steps and not latent:
        raise SpecbuildError(
            f"--joint-steps {options.joint_steps}: {options.model} has no {LATENT_FILE} to train "
            "with the indexers; make it with specbuild train mla, and leave --no-mla out"
        )
    with Session.begun(options, progress) as session:
        backbone = session.backbone(checkpointing=options.checkpointing)
        latents = None
        if latent:
            stored = load_file(options.model / LATENT_FILE)
            plain_target = read_target(options.model, strict=False, mla=False, dsa=False)
            plain = plain_outputs(plain_target)
            latents = LatentHeads(backbone, stored, plain, lora_rank=0, seed=options.seed)
            latents.requires_grad_(False)
        pattern = SparsePattern(options.top_k[0], options.first_tokens, options.recent_tokens)
        shape = IndexerShape(options.heads, options.width)
        indexers = IndexerHeads(backbone, layers, shape, pattern, seed=options.seed)
        schedule = Schedule(_stages(options, indexers, latents))

        def write(folder: Path) -> None:
            dtype = getattr(torch, options.stored_dtype)
            write_tensors(folder / INDEXER_FILE, indexers.tensors(dtype))
            if latents is not None and options.joint_steps:
                write_tensors(folder / LATENT_FILE, latents.tensors(dtype))

        judge = _judge(options, pattern, latent=latent)
        return session.trained(backbone, schedule, judge, write, started_s)


def _layers(options: IndexerTraining, target: TargetCheckpoint) -> tuple[int, ...]:
    g = target.geometry
    full = tuple(i for i, kind in enumerate(g.layer_types) if kind == "full_attention")
    layers = full if options.layers is None else parse_layers(options.layers, g.layers)
    windowed = sorted(set(layers) - set(full))
    if windowed or not layers:
        raise SpecbuildError(
            f"--layers {options.layers}: layer {windowed[0] if windowed else 'none'} attends to a "
            f"window only; name some of the full-attention layers {', '.join(map(str, full))}"
        )
    return layers


def _stages(
    options: IndexerTraining, indexers: IndexerHeads, latents: LatentHeads | None
) -> tuple[Stage, ...]:
    """Indexers first; then both, attention sparse as an engine's is."""
    alone: Mode = "whole" if set(dict(options.losses)) == {ATTENTION_KL} else "relaxed"
    stages = (_stage("indexers", options, indexers, indexers, alone),)
    if latents is None or not options.joint_steps:
        return stages
    both = nn.ModuleList([latents, indexers])
    mode: Mode = "sparse" if ATTENTION_KL in dict(options.joint_losses) else "relaxed"
    return (*stages, _stage("both", options, both, indexers, mode))


def _stage(
    name: str, options: IndexerTraining, heads: nn.Module, indexers: IndexerHeads, mode: Mode
) -> Stage:
    joint = heads is not indexers
    losses: Losses = options.joint_losses if joint else options.losses
    steps = options.joint_steps if joint else options.steps
    learns = ATTENTION_KL in dict(losses)

    def enter() -> None:
        indexers.pattern.mode = mode
        indexers.pattern.learns = learns

    def beside() -> Mapping[str, torch.Tensor]:
        return {ATTENTION_KL: indexers.divergence()} if learns else {}

    peak = options.joint_learning_rate if joint else options.learning_rate
    pace = LearningRateSchedule(steps, peak, options.warmup_fraction)
    return Stage(name, pace, dict(losses), heads, enter, beside)


def _judge(options: IndexerTraining, pattern: SparsePattern, *, latent: bool) -> Judge:
    def before(measure: Measure) -> dict[str, float]:
        found = {"model": measure(heads=False)}
        if latent:
            pattern.mode, pattern.learns = "whole", False
            found["latents"] = measure(heads=True)
        return found

    def after(measure: Measure) -> dict[str, float]:
        pattern.mode, pattern.learns = "sparse", False
        found = {}
        for pattern.top_k in options.top_k:
            found[f"top {pattern.top_k}"] = measure(heads=True)
        return found

    return Judge(before, after)
