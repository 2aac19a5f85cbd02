"""``specbuild retrofit mla``: latents for a checkpoint's keys and values, by factorization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specbuild.builder.checkpoint.latents import (
    DOWN,
    LATENT_FILE,
    UP_KEYS,
    UP_VALUES,
    full_rank,
    latent_name,
)
from specbuild.builder.checkpoint.source import DTYPE_BITS, read_header
from specbuild.builder.checkpoint.target_parts import EMBEDDING, TargetCheckpoint
from specbuild.builder.checkpoint.tensor_file import write_tensors
from specbuild.builder.families.checkpoints import read_retrofit_target
from specbuild.builder.families.family import Projection
from specbuild.builder.progress import Progress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.factorise import (
    Importance,
    Spectrum,
    allocate_ranks,
    factors_of,
    spectrum_of,
)
from specbuild.builder.training.retrofit.readers import (
    InputMoments,
    key_metric,
    moments_of,
    query_moment,
    value_metric,
)
from specbuild.builder.training.retrofit.report import LatentReport, LayerErrors
from specbuild.builder.training.retrofit.streamed_target import StreamedTarget
from specbuild.builder.training.retrofit.text import RetrofitText, read_text
from specbuild.runtime.errors import SpecbuildError

LoadedTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Survey:
    """The result of a pass over the unchanged model: spectra and input moments of layers."""

    spectra: dict[int, Spectrum]
    moments: dict[int, torch.Tensor]
    losses: torch.Tensor | None


def retrofit_mla(options: LatentOptions, progress: Progress) -> LatentReport:
    """Write the latents and return a report of their errors.

    Raises SpecbuildError for an invalid rank, layer, text or output, and then writes nothing.
    """
    file = options.output or options.model / LATENT_FILE
    _require_replaceable(file, force=options.force)
    target = read_retrofit_target(options.model, command="retrofit mla", mla=False)
    if not target.geometry.attention.qkv_bias:
        raise SpecbuildError(
            f"{options.model}: attention_bias is false, but latents need a model with biases"
        )
    layers = options.checked_layers(target.geometry.layers, full_rank(target.geometry))
    text = read_text(options, target)
    streamed = StreamedTarget(target.geometry, target.tensors)
    survey = _survey_model(streamed, layers, text, progress)
    ranks = _ranks(options, survey, layers, calibrated=text.calibration is not None)
    progress.start("factorizing", len(layers), "layer")
    tensors: LoadedTensors = {}
    errors = []
    for layer, rank in zip(layers, ranks, strict=True):
        weight = streamed.projections(layer)
        parts = _factorize(weight, survey.spectra[layer], rank, getattr(torch, options.dtype))
        tensors |= {latent_name(layer, part): tensor for part, tensor in parts.items()}
        errors.append(_errors(layer, weight, parts, survey.moments.get(layer)))
        progress.advance(1)
    after = None
    if text.evaluation is not None:
        after = losses_with(streamed, tensors, text.evaluation, progress)
    write_tensors(file, tensors)
    return _report(file, target, errors, text, (survey.losses, after))


def _require_replaceable(file: Path, *, force: bool) -> None:
    """Raise SpecbuildError if the latents would replace another file."""
    if not file.exists():
        return
    if not force:
        raise SpecbuildError(f"{file} exists; use --force or another --output")
    try:
        names = read_header(file)
    except SpecbuildError:
        names = {}
    if not any(name.endswith((DOWN, UP_KEYS, UP_VALUES)) for name in names):
        raise SpecbuildError(
            f"{file} exists and is not a file of latents, so --force does not replace it; use "
            "another --output"
        )


def _survey_model(
    target: StreamedTarget, layers: tuple[int, ...], text: RetrofitText, progress: Progress
) -> _Survey:
    """Run the unchanged model on the text; without text read its projections only."""
    spectra: dict[int, Spectrum] = {}
    moments: dict[int, torch.Tensor] = {}
    streams = [ids for ids in (text.calibration, text.evaluation) if ids is not None]
    progress.start("reading layers", target.geometry.layers, "layer")
    states = [target.embedded(ids) for ids in streams]
    for index in range(target.geometry.layers):
        importance = None
        if states:
            layer = target.layer(index)
            normed = [layer.normed(x) for x in states]
            if index in layers and text.calibration is not None:
                input_moments = moments_of(normed[0])
                moments[index] = input_moments.second
                importance = _importance(target, index, input_moments)
            states = [
                layer.forward(x, y, layer.keys_values) for x, y in zip(states, normed, strict=True)
            ]
        if index in layers:
            spectra[index] = spectrum_of(target.projections(index), importance)
        progress.advance(1)
    if text.evaluation is None:
        return _Survey(spectra, moments, None)
    return _Survey(spectra, moments, target.losses(states[-1], text.evaluation))


def _importance(target: StreamedTarget, index: int, inputs: InputMoments) -> Importance:
    g = target.geometry
    queries = query_moment(
        target.attention(index, "q_proj.weight"), target.attention(index, "q_proj.bias"), inputs
    )
    output = target.attention(index, "o_proj.weight")
    return Importance(inputs.second, key_metric(g, queries), value_metric(g, output))


def _ranks(
    options: LatentOptions, survey: _Survey, layers: tuple[int, ...], *, calibrated: bool
) -> tuple[int, ...]:
    """Return the mean rank for every layer, or with calibration the rank that each needs."""
    if not calibrated:
        return (options.rank,) * len(layers)
    return allocate_ranks([survey.spectra[layer].values for layer in layers], options.rank)


def _factorize(
    weight: torch.Tensor, spectrum: Spectrum, rank: int, dtype: torch.dtype
) -> LoadedTensors:
    factors = factors_of(weight, spectrum, rank)
    keys, values = factors.up.chunk(2, dim=1)
    parts = {DOWN: factors.down, UP_KEYS: keys, UP_VALUES: values}
    return {name: part.to(dtype).contiguous() for name, part in parts.items()}


def _errors(
    layer: int, weight: torch.Tensor, parts: LoadedTensors, moment: torch.Tensor | None
) -> LayerErrors:
    """Return the errors of the stored factors. ``tr(Dᵀ C D)`` is the mean of ``‖x D‖²``."""
    down, keys, values = (parts[name].double() for name in (DOWN, UP_KEYS, UP_VALUES))
    projections = weight.chunk(2, dim=1)
    residuals = [
        projection - down @ up for projection, up in zip(projections, (keys, values), strict=True)
    ]
    by_weight = [float(d.norm() / w.norm()) for d, w in zip(residuals, projections, strict=True)]
    by_output: list[float | None] = [None, None]
    if moment is not None:
        by_output = [
            float(((d * (moment @ d)).sum().clamp(min=0) / (w * (moment @ w)).sum()).sqrt())
            for d, w in zip(residuals, projections, strict=True)
        ]
    return LayerErrors(layer, down.shape[1], *by_weight, *by_output)


def losses_with(
    target: StreamedTarget, tensors: LoadedTensors, ids: torch.Tensor, progress: Progress
) -> torch.Tensor:
    """Return the losses of ``ids`` [N, T], [N, T − 1] nats, with the latents in ``tensors``."""
    progress.start("evaluating", target.geometry.layers, "layer")
    x = target.embedded(ids)
    for index in range(target.geometry.layers):
        layer = target.layer(index)
        projection: Projection = layer.keys_values
        if latent_name(index, DOWN) in tensors:
            projection = _through_latent(tensors, index)
        x = layer.forward(x, layer.normed(x), projection)
        progress.advance(1)
    return target.losses(x, ids)


def _through_latent(tensors: LoadedTensors, layer: int) -> Projection:
    down, keys, values = (
        tensors[latent_name(layer, part)].float() for part in (DOWN, UP_KEYS, UP_VALUES)
    )
    return lambda normed: (normed @ down) @ torch.cat([keys, values], dim=1)


def _report(
    file: Path,
    target: TargetCheckpoint,
    errors: list[LayerErrors],
    text: RetrofitText,
    losses: tuple[torch.Tensor | None, torch.Tensor | None],
) -> LatentReport:
    g = target.geometry
    value_bytes = DTYPE_BITS[target.tensors[EMBEDDING].dtype] // 8
    values_before = 2 * g.kv_heads * g.head_dim
    values_after = sum(entry.rank for entry in errors) + values_before * (g.layers - len(errors))
    before, after = (None if loss is None else float(loss.mean().exp()) for loss in losses)
    return LatentReport(
        file=file.name,
        method="svd" if text.calibration is None else "calibrated",
        mean_rank=sum(entry.rank for entry in errors) / len(errors),
        layers=tuple(errors),
        bytes_per_token_before=values_before * g.layers * value_bytes,
        bytes_per_token_after=values_after * value_bytes,
        calibrated_tokens=0 if text.calibration is None else text.calibration.numel(),
        evaluated_tokens=0 if losses[0] is None else losses[0].numel(),
        perplexity_before=before,
        perplexity_after=after,
    )
