"""``specbuild train dsa``: indexers that predict attention, alone and then with latents."""

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
from specbuild.builder.training.retrofit.config import parse_layers
from specbuild.builder.training.schedule import LearningRateSchedule
from specbuild.runtime.errors import SpecbuildError


def train_indexers(options: IndexerTraining, progress: Progress) -> HeadReport:
    """Train indexers and write ``options.output``: their file, a report and a plot of the losses.

    Joint training also writes the latents. A run that its time limit stops writes no output; the
    same options with ``resume`` continue it.

    Raises:
        SpecbuildError: options, text or model are invalid, the output exists, or the loss diverges.
    """
    started_s = time.monotonic()
    target = read_retrofit_target(options.model, command="train dsa", mla=options.mla)
    require_hidden_layers(options, target)
    layers = _layers(options, target)
    latent = target.geometry.latent_dims != ()
    if options.joint_steps and not latent:
        raise SpecbuildError(
            f"--joint-steps {options.joint_steps}: {options.model} has no {LATENT_FILE}, whose "
            "latents these steps train; create it with specbuild train mla, and remove --no-mla"
        )
    with Session.open(options, progress) as session:
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
            f"window only; use full-attention layers: {', '.join(map(str, full))}"
        )
    return layers


def _stages(
    options: IndexerTraining, indexers: IndexerHeads, latents: LatentHeads | None
) -> tuple[Stage, ...]:
    """Return a stage for the indexers, and one for both with an engine's sparse attention."""
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

    def extra_terms() -> Mapping[str, torch.Tensor]:
        return {ATTENTION_KL: indexers.divergence()} if learns else {}

    peak = options.joint_learning_rate if joint else options.learning_rate
    rates = LearningRateSchedule(steps, peak, options.warmup_fraction)
    return Stage(name, rates, dict(losses), heads, enter, extra_terms)


def _judge(options: IndexerTraining, pattern: SparsePattern, *, latent: bool) -> Judge:
    def before(measure: Measure) -> dict[str, float]:
        perplexities = {"model": measure(heads=False)}
        if latent:
            pattern.mode, pattern.learns = "whole", False
            perplexities["latents"] = measure(heads=True)
        return perplexities

    def after(measure: Measure) -> dict[str, float]:
        pattern.mode, pattern.learns = "sparse", False
        perplexities = {}
        for pattern.top_k in options.top_k:
            perplexities[f"top {pattern.top_k}"] = measure(heads=True)
        return perplexities

    return Judge(before, after)
