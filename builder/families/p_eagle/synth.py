"""Synthetic P-EAGLE drafts, correct at every position of a pass with a known probability.

A token of the target's cycle is embedded by φ of its place c (synth/places.py). The token d places
later is R^d·φ(c), where R rotates each pair by its frequency. KV head i attends only to the row i
positions earlier, because the rotary phases of its queries lag those of its keys by i positions. It
reads φ there and adds w_i·R^i·φ, with decreasing w_i. At depth d of a pass head d reads the last
accepted row. Heads before it read mask rows, whose φ is 0, and heads after it earlier rows, which
agree in a text that follows the cycle. The state thus has the place c + d at every depth, from
which the head predicts by the draft's rules. Deeper layers add noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional as F

from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.eagle3.synth import draft_config as eagle3_config
from specbuild.builder.families.eagle3.synth import draft_geometry as eagle3_geometry
from specbuild.builder.families.eagle3.synth_weights import DraftWriter
from specbuild.builder.families.eagle3.tensors import LAYER
from specbuild.builder.families.family import DraftSizes, SynthDraft
from specbuild.builder.families.p_eagle.checkpoint import MASK_HIDDEN, mask_tensors
from specbuild.builder.families.p_eagle.config import ARCHITECTURES
from specbuild.builder.families.parts.rope import inverse_frequencies
from specbuild.builder.synth.places import angles_of, phi, places_along, rotation
from specbuild.builder.synth.self_attention import self_amplitudes
from specbuild.builder.synth.streams import CONSTANT, embedding_rms
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry, PEagleRecord
from specbuild.runtime.engine_dir.geometry import TargetGeometry

# Positions of a pass; each has a KV head. Published drafts have four layers.
POSITIONS, LAYERS = 8, 4
_FALL = 0.8  # the ratio of w_i to w_(i − 1)
_DEEP_NOISE = 0.01  # a deeper layer's noise, relative to the rms of the state
_QUERY_NOISE = 0.02
_GATED_RMS = 0.6
_ATTENTION = f"{LAYER}self_attn."


def draft_geometry(target: TargetGeometry, sizes: DraftSizes) -> PEagleGeometry:
    """Return EAGLE3's geometry with a KV head for each position and a separate embedding."""
    base = eagle3_geometry(target, sizes)
    heads = max(base.q_heads - base.q_heads % POSITIONS, POSITIONS)
    changed = replace(
        base,
        architecture=ARCHITECTURES[0],
        q_heads=heads,
        kv_heads=POSITIONS,
        own_embedding=True,
        layers=LAYERS,
    )
    return PEagleGeometry(**vars(changed), mask_token=target.vocab - 1)


def draft_config(d: Eagle3Geometry, target: TargetGeometry) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry."""
    assert isinstance(d, PEagleGeometry)
    fields = {
        "num_hidden_layers": d.layers,
        "parallel_drafting": True,
        "ptd_token_id": d.mask_token,
    }
    return eagle3_config(d, target) | fields


def draft_checkpoint(d: Eagle3Geometry, tensors: dict[str, SourceTensor]) -> DraftCheckpoint:
    """Return the result of reading these tensors."""
    assert isinstance(d, PEagleGeometry)
    engine_tensors = {n: t for n, t in tensors.items() if n not in ("t2d", MASK_HIDDEN)}
    engine_tensors |= mask_tensors(tensors[MASK_HIDDEN], tensors, d)
    return DraftCheckpoint(d, engine_tensors, (), PEagleRecord)


class PEagleWriter(DraftWriter):
    """The tensors; ``_space`` is the width of a head, which represents a token's place."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._space = self._geometry.head_dim
        power = 5 * self._space
        self._hidden_rms = math.sqrt(power / self._geometry.hidden)

    def tensors(self) -> dict[str, SynthTensor]:
        """Return all tensors by checkpoint names, with ``d2t``, ``t2d`` and ``mask_hidden``."""
        width = len(self._geometry.aux_layers) * self._target.hidden
        mask = whole_tensor("BF16", (1, 1, width), partial(self._mask, width))
        return super().tensors() | {MASK_HIDDEN: mask}

    def _full_tensors(self) -> dict[str, Callable[[], torch.Tensor]]:
        return super()._full_tensors() | {f"{_ATTENTION}v_proj.weight": self._place_values}

    def _row_tensors(self) -> dict[str, Callable[[int, int], torch.Tensor]]:
        return super()._row_tensors() | {"embed_tokens.weight": self._embedding}

    def _mask(self, width: int) -> torch.Tensor:
        """mask_hidden [1, 1, aux_layers·Ht]: states with only their constant."""
        mask = torch.zeros(1, 1, width)
        mask[..., :: self._target.hidden] = CONSTANT
        return mask.bfloat16()

    def _queries(self, name: str, heads: int) -> torch.Tensor:
        """q_proj or k_proj [heads·D, 2H]; queries of KV head i lag by i positions."""
        d = self._geometry
        half, shared = d.head_dim // 2, heads // d.kv_heads
        weight = self._normal(f"{_ATTENTION}{name}.weight", heads * d.head_dim, 2 * d.hidden)
        weight *= _QUERY_NOISE / math.sqrt(2 * d.hidden)
        phase = self._noise.generator("phases of queries and keys")
        angles = 2 * math.pi * torch.rand(d.kv_heads, half, generator=phase, dtype=torch.float64)
        if name == "q_proj":
            distance = torch.arange(d.kv_heads, dtype=torch.float64)
            angles -= torch.outer(distance, inverse_frequencies(d.rope, d.head_dim))
        angles = angles.repeat_interleave(shared, dim=0)
        positions = d.max_positions or self._target.max_positions
        length = self_amplitudes(d, positions) * embedding_rms(d.hidden) / CONSTANT
        pairs = torch.cat((length * angles.cos(), length * angles.sin()), dim=1)
        weight[:, 0] = pairs.flatten()
        return weight.bfloat16()

    def _place_values(self) -> torch.Tensor:
        """v_proj [kv_heads·D, 2H]: every head reads φ of the normed embedding, with rms 1."""
        d = self._geometry
        # φ has the length √(H − 1) / rms in a normed embedding.
        length = math.sqrt(d.hidden - 1) / embedding_rms(d.hidden)
        per_head = torch.zeros(d.head_dim, 2 * d.hidden)
        per_head[:, : d.hidden] = self._read.T * (math.sqrt(self._space) / length)
        return per_head.repeat(d.kv_heads, 1).bfloat16()

    def _output(self) -> torch.Tensor:
        """o_proj [H, Hq·D]: KV head i rotates by i places with weight w_i, then applies Q."""
        d = self._geometry
        shared, parts = d.q_heads // d.kv_heads, []
        for place in range(d.kv_heads):
            weighted = self._basis @ rotation(self._angles, place) * (_FALL**place / shared)
            parts += [weighted] * shared
        return torch.cat(parts, dim=1).bfloat16()

    def _noisy(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Return weights that add noise: the MLPs, and the attention of deeper layers."""
        std = 1 / math.sqrt(shape[1])
        if name.endswith(("down_proj.weight", "o_proj.weight")):
            std *= _DEEP_NOISE * self._hidden_rms / _GATED_RMS

        def part(first: int, end: int) -> torch.Tensor:
            return self._noise.weight(f"draft.{name}", torch.arange(first, end), shape[1], std)

        return SynthTensor("BF16", shape, part)

    def _embedding(self, first: int, end: int) -> torch.Tensor:
        """Return rows of the embedding: the constant, and φ of the token's place, √(H − 1) long.

        The mask token and tokens outside of the cycle have a direction outside of φ's space.
        """
        places = self._places[first:end]
        rows = F.normalize(self._phi(places), dim=1) @ self._read.T
        rows[places < 0] = self._outside_direction
        rows *= math.sqrt(self._geometry.hidden - 1)
        rows[:, 0] = CONSTANT
        return rows.bfloat16()

    def _head(self, first: int, end: int) -> torch.Tensor:
        """Return rows of lm_head: the state at the place of the token before each row's."""
        content = F.normalize(self._phi(self._places[self._rules.before[first:end]]), dim=1)
        scale = self._correct_logits(first, end) * self._hidden_rms / math.sqrt(self._space)
        return (content @ self._basis.T * scale.float()).bfloat16()

    def _phi(self, places: torch.Tensor) -> torch.Tensor:
        return phi(self._angles, places)

    @cached_property
    def _angles(self) -> torch.Tensor:
        return angles_of(self._noise, len(self._rules.cycle), self._geometry.head_dim // 2)

    @cached_property
    def _places(self) -> torch.Tensor:
        return places_along(self._rules.cycle, self._target.vocab)

    @cached_property
    def _directions(self) -> torch.Tensor:
        """Orthonormal columns that are 0 in coordinate 0, fp32 [H, D + 1]."""
        d = self._geometry
        drawn = self._normal("where embeddings tell a place", d.hidden, d.head_dim + 1)
        drawn[0] = 0
        return torch.linalg.qr(drawn).Q

    @property
    def _read(self) -> torch.Tensor:
        return self._directions[:, :-1]

    @property
    def _outside_direction(self) -> torch.Tensor:
        return self._directions[:, -1]


P_EAGLE_SYNTH = SynthDraft(
    geometry=draft_geometry,
    config=draft_config,
    tensors=lambda *parts: PEagleWriter(*parts).tensors(),
    checkpoint=draft_checkpoint,
)
