"""The weights of a synthetic GPT-OSS.

Greedy decoding follows a permutation of the tokens: the head's row of a token is the embedding of
the token before it, less the constant. With a hidden size of 2880 the right logit is 2880 in units
where the best of 200,000 others is about 250. Every sublayer adds a few per cent of the stream, in
random directions, so the permutation holds at any depth while nothing that is computed is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbuild.builder.checkpoint.indexers import indexer_shapes
from specbuild.builder.checkpoint.latents import latent_name, latent_shapes
from specbuild.builder.checkpoint.mxfp4 import BLOCK_VALUES, SCALE_BIAS
from specbuild.builder.checkpoint.target_tensors import EMBEDDING, HEAD, target_tensors
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.streams import embeddings, token_directions
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.builder.synth.tokens import TokenRules
from specbuild.plugins_cuda.moe.e2m1 import E2M1
from specbuild.runtime.engine_dir.manifest import TargetGeometry

RIGHT_LOGIT = 30.0
CONTRIBUTION = 0.04  # rms of what a sublayer adds, the stream's being 1
NORM_STD = 0.05
BIAS_STD = 0.02
SINK_STD = 0.5
EXPERT_BIAS_STD = 0.05
# Codes of a scale: a power of two and its neighbours, equally often.
_SCALE_STEPS = (-1, 0, 1)
_GATED_RMS = 1.3  # of silu(gate)·(up + 1) when both have the deviation that _GATE_UP_RMS asks for
_GATE_UP_RMS = 1.2
_MIXTURE = 0.55  # what four experts add up to, weighted by the router, against one


@dataclass(frozen=True)
class _Fill:
    """Makes one tensor of a layer: from its name and shape to its parts."""

    noise: Noise
    geometry: TargetGeometry

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> SynthTensor:
        """Normal values around 0."""
        return self._rows("BF16", shape, lambda rows, w: self.noise.weight(name, rows, w, std))

    def norm(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Normal values around 1."""
        return self._rows(
            "BF16",
            shape,
            lambda rows, w: (1 + self.noise.normal(name, rows, w, NORM_STD)).bfloat16(),
        )

    def router(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Unit logits that do not see the constant, which would favour some experts always."""

        def make(rows: torch.Tensor, width: int) -> torch.Tensor:
            weight = self.noise.weight(name, rows, width, 1 / math.sqrt(width))
            weight[:, 0] = 0
            return weight

        return self._rows("BF16", shape, make)

    def blocks(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Uniform codes, two a byte."""
        return self._rows("U8", shape, lambda rows, w: self.noise.bytes(name, rows, w), 2)

    def scales(self, name: str, shape: tuple[int, ...], output_rms: float) -> SynthTensor:
        """Scales that give an output of about ``output_rms`` from an input of rms 1."""
        spread = math.sqrt(sum(4.0**step for step in _SCALE_STEPS) / len(_SCALE_STEPS))
        values = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))
        exponent = round(
            math.log2(output_rms / (values * spread * math.sqrt(shape[-1] * BLOCK_VALUES)))
        )
        among = [SCALE_BIAS + exponent + step for step in _SCALE_STEPS]
        return self._rows("U8", shape, lambda rows, w: self.noise.choices(name, rows, w, among))

    @staticmethod
    def _rows(
        dtype: str,
        shape: tuple[int, ...],
        make: Callable[[torch.Tensor, int], torch.Tensor],
        row_axes: int = 1,
    ) -> SynthTensor:
        """A row is the last ``row_axes`` axes; a vector is one row."""
        if len(shape) == 1:
            one = torch.zeros(1, dtype=torch.int64)
            return SynthTensor(dtype, shape, lambda first, end: make(one, shape[0])[0, first:end])
        width = math.prod(shape[-row_axes:])
        per_entry = math.prod(shape[1:]) // width

        def part(first: int, end: int) -> torch.Tensor:
            rows = torch.arange(first * per_entry, end * per_entry)
            return make(rows, width).view(end - first, *shape[1:])

        return SynthTensor(dtype, shape, part)


def synth_target(noise: Noise, g: TargetGeometry, rules: TokenRules) -> dict[str, SynthTensor]:
    """All tensors of the target, by their names in a checkpoint."""
    fill = _Fill(noise, g)
    made = {}
    for name, expected in target_tensors(g).items():
        if name == EMBEDDING:
            made[name] = _embedding(noise, g)
        elif name == HEAD:
            made[name] = _head(noise, g, rules)
        else:
            made[name] = _layer_tensor(fill, name, expected.shape)
    for layer, latent in enumerate(g.latent_dims):
        for projection in ("k_proj", "v_proj"):
            del made[f"{latent_name(layer, projection)}.weight"]
        for name, shape in latent_shapes(g, layer, latent).items():
            made[name] = fill.normal(name, shape, 1 / math.sqrt(shape[0]))
    if g.indexer is not None:
        for name, shape in indexer_shapes(g, g.indexer).items():
            made[name] = fill.normal(name, shape, 1 / math.sqrt(shape[0]))
    return made


def _embedding(noise: Noise, g: TargetGeometry) -> SynthTensor:
    def part(first: int, end: int) -> torch.Tensor:
        return embeddings(noise, torch.arange(first, end), g.hidden)

    return SynthTensor("BF16", (g.vocab, g.hidden), part)


def _head(noise: Noise, g: TargetGeometry, rules: TokenRules) -> SynthTensor:
    def part(first: int, end: int) -> torch.Tensor:
        rows = token_directions(noise, rules.before[first:end], g.hidden)
        return rows.mul_(RIGHT_LOGIT / g.hidden).bfloat16()

    return SynthTensor("BF16", (g.vocab, g.hidden), part)


def _layer_tensor(fill: _Fill, name: str, shape: tuple[int, ...]) -> SynthTensor:
    g = fill.geometry
    kind = name.split(".", 3)[3] if ".layers." in name else name
    if kind.endswith("norm.weight"):
        return fill.norm(name, shape)
    if kind.endswith("_blocks"):
        return fill.blocks(name, shape)
    if kind == "mlp.router.weight":
        return fill.router(name, shape)
    output_rms = {
        "mlp.experts.gate_up_proj_scales": _GATE_UP_RMS,
        "mlp.experts.down_proj_scales": CONTRIBUTION / (_GATED_RMS * _MIXTURE),
    }
    if kind in output_rms:
        return fill.scales(name, shape, output_rms[kind])
    std = {
        "self_attn.o_proj.weight": CONTRIBUTION / math.sqrt(g.q_heads * g.head_dim),
        "self_attn.o_proj.bias": BIAS_STD * CONTRIBUTION,
        "self_attn.sinks": SINK_STD,
        "mlp.experts.gate_up_proj_bias": EXPERT_BIAS_STD,
        "mlp.experts.down_proj_bias": EXPERT_BIAS_STD * CONTRIBUTION,
    }.get(kind, BIAS_STD if kind.endswith(".bias") else 1 / math.sqrt(g.hidden))
    return fill.normal(name, shape, std)
