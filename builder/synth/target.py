"""The weights of a synthetic target.

Greedy decoding follows a permutation of the tokens: the head's row of a token is the embedding of
the token before it, less the constant. With a hidden size of 2880 the right logit is 2880 in units
where the best of 200,000 others is about 250. Every sublayer adds a few per cent of the stream, in
random directions, so the permutation holds at any depth while nothing that is computed is zero.
"""

from __future__ import annotations

import math

import torch

from specbuild.builder.checkpoint.indexers import indexer_shapes
from specbuild.builder.checkpoint.latents import latent_name, latent_shapes
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.registry import target_family
from specbuild.builder.synth.fill import CONTRIBUTION, Fill
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.places import Places
from specbuild.builder.synth.spread import TokenSpread
from specbuild.builder.synth.streams import embedding_rms, embeddings, token_directions
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.builder.synth.tokens import TokenRules
from specbuild.runtime.engine_dir.geometry import TargetGeometry

RIGHT_LOGIT = 30.0


def synth_target(
    noise: Noise,
    g: TargetGeometry,
    rules: TokenRules,
    places: Places | TokenSpread | None = None,
    contribution: float = CONTRIBUTION,
) -> dict[str, SynthTensor]:
    """Return all tensors of the target, by their names in a checkpoint.

    ``places`` are the requirements of a draft on its embedding and head, or the distribution of the
    next token. ``contribution`` is the rms of a sublayer's addition, relative to the stream's 1.
    """
    fill, family = Fill(noise, contribution), target_family(g.model_type)
    assert family.synth is not None
    made = {}
    for name, expected in family.checkpoint.tensors(g).items():
        if name == EMBEDDING:
            made[name] = _embedding(noise, g, places)
        elif name == HEAD:
            made[name] = _head(fill, g, rules, places)
        else:
            made[name] = family.synth.tensor(fill, g, name, expected.shape)
    for layer, latent in enumerate(g.latent_dims if g.mla is None else ()):
        for projection in ("k_proj", "v_proj"):
            del made[f"{latent_name(layer, projection)}.weight"]
        for name, shape in latent_shapes(g, layer, latent).items():
            made[name] = fill.normal(name, shape, 1 / math.sqrt(shape[0]))
    if g.indexer is not None:
        for name, shape in indexer_shapes(g, g.indexer).items():
            made[name] = fill.normal(name, shape, 1 / math.sqrt(shape[0]))
    return made


def _embedding(noise: Noise, g: TargetGeometry, places: Places | TokenSpread | None) -> SynthTensor:
    factor = 1.0 if g.multipliers is None else g.multipliers.embedding

    def part(first: int, end: int) -> torch.Tensor:
        # The stream of every target has the same start: drafts are made for it.
        return embeddings(noise, torch.arange(first, end), g.hidden, places) / factor

    return SynthTensor("BF16", (g.vocab, g.hidden), part)


def _head(
    fill: Fill, g: TargetGeometry, rules: TokenRules, places: Places | TokenSpread | None
) -> SynthTensor:
    noise = fill.noise

    def part(first: int, end: int) -> torch.Tensor:
        before = rules.before[first:end]
        if isinstance(places, TokenSpread):
            # The last norm divides by the length of the embedding and the additions of sublayers.
            added = 2 * g.layers * fill.contribution**2
            length = math.sqrt(embedding_rms(g.hidden) ** 2 + added)
            return (places.head(noise, before, g.hidden) * length).bfloat16()
        rows = token_directions(noise, before, g.hidden, places)
        if places is not None and places.silent is not None:
            rows[before == places.silent] *= -1
        return rows.mul_(RIGHT_LOGIT / g.hidden).bfloat16()

    return SynthTensor("BF16", (g.vocab, g.hidden), part)
