"""Evaluates a text with two engines, and decodes prompts with both alternately."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specbuild.builder.progress import Progress
from specbuild.cli.bench.pairs import decoded
from specbuild.cli.compare.report import Comparison, EngineSide, PositionBin
from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.measure.fidelity import FidelityRows
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt

_WARM_UP_TOKENS = 8
_BINS = 16
# The start of a piece that is decoded if no prompts are given.
_PROMPT_TOKENS = 64

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Engines:
    """Two loaded engines of one model, and their directories."""

    reference: Engine
    other: Engine
    paths: tuple[str, str]

    @property
    def both(self) -> tuple[Engine, Engine]:
        """Both engines, the reference first."""
        return self.reference, self.other


@dataclass(frozen=True)
class CompareSettings:
    """Sizes of a comparison; the first ``context`` tokens of each piece are not evaluated.

    ``new_tokens`` are decoded from each prompt, ``rounds`` times with each engine; 0 measures no
    speed.
    """

    context: int
    new_tokens: int
    rounds: int


def compare(
    engines: Engines,
    texts: Sequence[Ids],
    prompts: Sequence[Prompt],
    settings: CompareSettings,
    progress: Progress,
) -> Comparison:
    """Compare the engines on texts, which have at least two tokens after the context.

    Raises SpecbuildError if an engine cannot compute the logits after a text's tokens.
    """
    rows, positions = FidelityRows(), []
    progress.start("text", sum(len(text) - 1 - settings.context for text in texts), "tokens")
    for text in texts:
        for position, reference, other in _aligned(engines, text, settings.context):
            keep = (position >= settings.context) & (position < len(text) - 1)
            if keep.any():
                rows.add(reference[keep], other[keep], np.array(text)[position[keep] + 1])
                positions.append(position[keep])
                progress.advance(int(keep.sum()))
    pairs = _speeds(engines, prompts or _beginnings(texts), settings, progress)
    ratios = [
        theirs.stats.output_tokens_per_s / ours.stats.output_tokens_per_s for ours, theirs in pairs
    ]
    return Comparison(
        reference=_side(engines.reference, engines.paths[0], [ours for ours, _ in pairs]),
        other=_side(engines.other, engines.paths[1], [theirs for _, theirs in pairs]),
        fidelity=rows.result(),
        by_position=_by_position(np.concatenate(positions), rows.divergence),
        judged_from=settings.context,
        speed_ratio=median(ratios) if ratios else None,
    )


def _aligned(
    engines: Engines, text: Ids, context: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield positions [n] and the logits [n, V] of both, for any chunk sizes of the engines."""
    streams = [logits_behind(engine, text, context) for engine in engines.both]
    chunks = [next(stream) for stream in streams]
    first = 0
    while first < len(text) - 1:
        ends = [start + len(logits) for start, logits in chunks]
        end = min(ends)
        ours, theirs = (logits[first - start : end - start] for start, logits in chunks)
        yield np.arange(first, end), ours, theirs
        first = end
        if first < len(text) - 1:
            chunks = [
                next(stream) if end == first else rows
                for stream, rows, end in zip(streams, chunks, ends, strict=True)
            ]
    for stream in streams:
        stream.close()


def logits_behind(
    engine: Engine, text: Ids, context: int
) -> Generator[tuple[int, np.ndarray], None, None]:
    """Yield the first position of each chunk, and its logits.

    On the host, an engine whose steps attend to less than a prompt's rows decodes the tokens after
    the context one by one. A device processes all of them as a prompt.
    """
    lossy = engine.manifest.specpv is not None or engine.manifest.dsa is not None
    stepped = lossy and not engine.executor.capabilities.device_step
    for rows in engine.decoder.score(text, prompt_tokens=max(1, context) if stepped else None):
        yield rows.first, rows.logits


def _beginnings(texts: Sequence[Ids]) -> list[Prompt]:
    return [
        Prompt(id=f"text {i}", prompt_ids=text[: min(_PROMPT_TOKENS, len(text))])
        for i, text in enumerate(texts, start=1)
    ]


def _speeds(
    engines: Engines, prompts: Sequence[Prompt], settings: CompareSettings, progress: Progress
) -> list[tuple[RunRecord, RunRecord]]:
    """Decode each prompt with both engines in direct succession, alternating which is first."""
    if settings.new_tokens == 0:
        return []
    params = GenerateParams(max_new_tokens=settings.new_tokens, ignore_eos=True)
    warm_up = GenerateParams(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    for engine in engines.both:
        decoded(engine, prompts[0], warm_up, DraftSetting())
    progress.start("speed", settings.rounds * len(prompts), "prompts")
    pairs = []
    for round_index in range(settings.rounds):
        for i, prompt in enumerate(prompts):
            order = engines.both if (round_index + i) % 2 == 0 else engines.both[::-1]
            records = [decoded(engine, prompt, params, DraftSetting()) for engine in order]
            first, second = records if order == engines.both else records[::-1]
            pairs.append((first, second))
            progress.advance(1)
    return pairs


def _side(engine: Engine, path: str, records: Sequence[RunRecord]) -> EngineSide:
    manifest, stats = engine.manifest, [record.stats for record in records]
    memory = predict_memory(manifest)
    return EngineSide(
        path=path,
        backend=manifest.backend,
        lossy=lossy_names(manifest),
        weights_bytes=memory.weights_bytes,
        cache_bytes_per_token=cache_bytes_per_token(manifest, memory.kv_bytes),
        draft=" and ".join(model.geometry.architecture for model in manifest.models) or "none",
        tokens_per_s=median(s.output_tokens_per_s for s in stats) if stats else None,
        ttft_s=median(s.ttft_s for s in stats) if stats else None,
        tokens_per_step=median(s.mean_acceptance_length for s in stats) if stats else None,
    )


def lossy_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the properties of an engine that may change tokens relative to its checkpoint."""
    target = manifest.target
    modes = {
        "SpecPV": manifest.specpv is not None,
        "DSA": manifest.dsa is not None,
        # Latents with which the model was trained change nothing.
        "latents": bool(target.latent_dims) and target.mla is None,
        f"{target.dtype} weights": target.dtype is not None,
        "fp8 caches": bool(manifest.lossy_groups),
    }
    return tuple(name for name, chunks in modes.items() if chunks)


def cache_bytes_per_token(manifest: Manifest, kv_bytes: dict[str, int]) -> float:
    """Return the bytes of a token in the groups without a window, which grow with the length."""
    full_groups = [group for group in manifest.cache_groups if not group.window]
    return sum(kv_bytes[g.name] / (g.pages * g.page_size) for g in full_groups)


def _by_position(positions: np.ndarray, divergence: np.ndarray) -> tuple[PositionBin, ...]:
    """Return bins of equal width over the evaluated positions."""
    first, last = int(positions.min()), int(positions.max())
    edges = np.unique(np.linspace(first, last + 1, _BINS + 1).astype(int))
    bins = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (positions >= start) & (positions < end)
        if inside.any():
            mean = float(divergence[inside].mean())
            bins.append(PositionBin(start, end - 1, int(inside.sum()), mean))
    return tuple(bins)
