"""Synthetic DFlash drafts, correct at every row of a block with a known probability.

Embedding and head are the target's. The direction of each token contains φ of two places
(synth/places.py): one to read, and one from which the head predicts the next token. ``fc`` moves
the former from the target's states to separate coordinates, which are empty in embeddings. The rows
of a block therefore carry no information: only the context does.

KV head i attends only to the row i + 1 positions earlier, because the rotary phases of its queries
lag those of its keys by this much. It reads φ there and adds w_i·R^i·φ, with decreasing w_i. Row d
of a block is d positions after the newest token. Head d reads the token before that, at place c.
Heads before it read the block, and heads after it earlier tokens, which agree in a text that
follows the cycle. Row d thus has the place c + d of the token before its own, from which the
target's head predicts by the draft's rules. Deeper layers add noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.dflash.checkpoint import dflash_shapes
from specbuild.builder.families.dflash.config import ARCHITECTURES, OWN_MODEL_TYPE
from specbuild.builder.families.family import DraftSizes, SynthDraft
from specbuild.builder.families.parts.rope import inverse_frequencies
from specbuild.builder.synth.configs import rope_config
from specbuild.builder.synth.draft_heads import draft_heads
from specbuild.builder.synth.fill import NORM_STD
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.places import READ_SHARE, Places, angles_of, rotation, told_places
from specbuild.builder.synth.self_attention import self_amplitudes
from specbuild.builder.synth.streams import CONSTANT
from specbuild.builder.synth.tensor import SynthTensor, whole_tensor
from specbuild.builder.synth.tokens import DraftRules
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry, DFlashRecord
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry

# Rows of a block; each but the first has a KV head. Published drafts have eight layers.
BLOCK, LAYERS = 8, 8
_STATES = 5  # the number of target states that published drafts read
_TILE = 32
_FALL = 0.6  # the ratio of w_i to w_(i − 1)
_STRENGTH = 40.0  # of head 1's contribution, relative to the rms of an embedding
_GAIN = 8.0  # the part of the strength in v_proj: weights beyond 12 have no MXFP4 form
_CONTEXT = 0.25  # fc's factor for the constant and the place of each state
_CONTEXT_NOISE = 1.0  # rms of fc's other outputs
_DEEP_NOISE = 0.01  # a layer's noise, relative to the rms of an embedding
_QUERY_NOISE = 0.02
_GATED_RMS = 0.6
_ATTENTION = "layers.0.self_attn."


def draft_geometry(target: TargetGeometry, sizes: DraftSizes) -> DFlashGeometry:
    """Return the target's heads with a KV head for each row, and the layers of published drafts."""
    del sizes  # used only by drafts with a separate vocabulary
    heads = draft_heads(target)
    step = max(1, (target.layers - 4) // (_STATES - 1))
    aux_layers = tuple(range(1, target.layers, step))[:_STATES] or (0,)
    return DFlashGeometry(
        architecture=ARCHITECTURES[0],
        hidden=target.hidden,
        vocab=target.vocab,
        q_heads=max(heads.q_heads - heads.q_heads % BLOCK, BLOCK),
        kv_heads=BLOCK,
        head_dim=heads.head_dim,
        inner=target.hidden * 8 // (3 * _TILE) * _TILE,
        layers=LAYERS,
        rms_eps=1e-6,
        rope=heads.rope,
        aux_layers=aux_layers,
        max_positions=target.max_positions,
        block_size=BLOCK,
        mask_token=target.vocab - 1,
        causal=False,
        attention=AttentionParts(qk_norm="head"),
    )


def draft_config(d: DFlashGeometry, target: TargetGeometry) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry."""
    section = {"mask_token_id": d.mask_token, "target_layer_ids": list(d.aux_layers)}
    return {
        "architectures": [d.architecture],
        "attention_bias": False,
        "block_size": d.block_size,
        "dflash_config": section,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "intermediate_size": d.inner,
        "layer_types": ["full_attention"] * d.layers,
        "max_position_embeddings": d.max_positions,
        "model_type": OWN_MODEL_TYPE,
        "num_attention_heads": d.q_heads,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "num_target_layers": target.layers,
        "rms_norm_eps": d.rms_eps,
        "rope_scaling": rope_config(d.rope),
        "rope_theta": d.rope.theta,
        "vocab_size": d.vocab,
    }


def draft_checkpoint(d: DFlashGeometry, tensors: dict[str, SourceTensor]) -> DraftCheckpoint:
    """Return the result of reading these tensors."""
    return DraftCheckpoint(d, tensors, (), DFlashRecord)


def block_places(noise: Noise, d: DFlashGeometry, rules: DraftRules) -> Places:
    """Return places with the width of a head; no token follows the mask token."""
    return told_places(noise, rules, d.vocab, d.head_dim, silent=d.mask_token)


class DFlashWriter:
    """The tensors of a draft of ``geometry`` that follows ``rules``."""

    def __init__(self, noise: Noise, geometry: DFlashGeometry, rules: DraftRules) -> None:
        self._noise, self._geometry = noise, geometry
        self._angles = angles_of(noise, len(rules.cycle), geometry.head_dim // 2)

    def tensors(self, target: TargetGeometry) -> dict[str, SynthTensor]:
        """Return all tensors by their names in a checkpoint."""
        d = self._geometry
        special: dict[str, Callable[[], torch.Tensor]] = {
            "fc.weight": lambda: self._context(target.hidden),
            f"{_ATTENTION}q_proj.weight": lambda: self._queries("q_proj", d.q_heads),
            f"{_ATTENTION}k_proj.weight": lambda: self._queries("k_proj", d.kv_heads),
            f"{_ATTENTION}v_proj.weight": self._values,
            f"{_ATTENTION}o_proj.weight": self._output,
            f"{_ATTENTION}q_norm.weight": self._head_norm,
            f"{_ATTENTION}k_norm.weight": self._head_norm,
        }
        tensors = {}
        for name, shape in dflash_shapes(d, target).items():
            if name in special:
                tensors[name] = whole_tensor("BF16", shape, special[name])
            elif name.endswith("norm.weight"):
                tensors[name] = whole_tensor("BF16", shape, partial(self._norm, name, shape[0]))
            else:
                tensors[name] = self._noisy(name, shape)
        return tensors

    def _context(self, hidden: int) -> torch.Tensor:
        """fc [H, aux_layers·Ht]: keeps the constant, and moves φ to the free coordinates."""
        d, width = self._geometry, self._geometry.head_dim
        count = len(d.aux_layers)
        weight = self._normal("fc.weight", d.hidden, count * hidden)
        weight *= _CONTEXT_NOISE / math.sqrt(count * hidden)
        weight[0], weight[1 + 2 * width : 1 + 3 * width] = 0, 0
        for first in range(0, count * hidden, hidden):
            weight[0, first] = _CONTEXT
            for i in range(width):
                weight[1 + 2 * width + i, first + 1 + i] = _CONTEXT
        return weight.bfloat16()

    def _queries(self, name: str, heads: int) -> torch.Tensor:
        """q_proj or k_proj [heads·D, H]; queries of KV head i lag by i + 1 positions."""
        d = self._geometry
        half, shared = d.head_dim // 2, heads // d.kv_heads
        weight = self._normal(f"{_ATTENTION}{name}.weight", heads * d.head_dim, d.hidden)
        weight *= _QUERY_NOISE / math.sqrt(d.hidden)
        phase = self._noise.generator("phases of queries and keys")
        angles = 2 * math.pi * torch.rand(d.kv_heads, half, generator=phase, dtype=torch.float64)
        if name == "q_proj":
            distance = torch.arange(1, d.kv_heads + 1, dtype=torch.float64)
            angles -= torch.outer(distance, inverse_frequencies(d.rope, d.head_dim))
        angles = angles.repeat_interleave(shared, dim=0)
        pairs = torch.cat((self._amplitudes * angles.cos(), self._amplitudes * angles.sin()), dim=1)
        weight[:, 0] = pairs.flatten() / CONSTANT
        return weight.bfloat16()

    def _head_norm(self) -> torch.Tensor:
        """q_norm or k_norm [D]: restores the length of the rotary pairs."""
        width = self._geometry.head_dim
        length = float(torch.linalg.vector_norm(self._amplitudes)) / math.sqrt(width)
        return torch.full((width,), length, dtype=torch.bfloat16)

    def _values(self) -> torch.Tensor:
        """v_proj [kv_heads·D, H]: every head reads φ from fc's output."""
        d, width = self._geometry, self._geometry.head_dim
        per_head = torch.zeros(width, d.hidden)
        per_head[:, 1 + 2 * width : 1 + 3 * width] = _GAIN * torch.eye(width)
        return per_head.repeat(d.kv_heads, 1).bfloat16()

    def _output(self) -> torch.Tensor:
        """o_proj [H, Hq·D]: KV head i rotates by i places with weight w_i, for the head to read."""
        d, width = self._geometry, self._geometry.head_dim
        shared = d.q_heads // d.kv_heads
        weight = self._normal(f"{_ATTENTION}o_proj.weight", d.hidden, d.q_heads * width)
        weight *= _DEEP_NOISE / math.sqrt(d.hidden)
        weight[1 : 1 + 3 * width] = 0
        scale = _STRENGTH * math.sqrt(d.hidden) / (_GAIN * self._read_length * shared)
        for head in range(d.q_heads):
            place = head // shared
            if place:
                rotated = rotation(self._angles, place) * (scale * _FALL ** (place - 1))
                weight[1 + width : 1 + 2 * width, head * width : (head + 1) * width] = rotated
        return weight.bfloat16()

    def _noisy(self, name: str, shape: tuple[int, ...]) -> SynthTensor:
        """Return weights that add noise: the MLPs, and the attention of deeper layers."""
        std = 1 / math.sqrt(shape[1])
        if name.endswith(("down_proj.weight", "o_proj.weight")):
            std *= _DEEP_NOISE / _GATED_RMS

        def part(first: int, end: int) -> torch.Tensor:
            return self._noise.weight(f"draft.{name}", torch.arange(first, end), shape[1], std)

        return SynthTensor("BF16", shape, part)

    def _norm(self, name: str, width: int) -> torch.Tensor:
        one = torch.zeros(1, dtype=torch.int64)
        return (1 + self._noise.normal(f"draft.{name}", one, width, NORM_STD)[0]).bfloat16()

    def _normal(self, name: str, rows: int, width: int) -> torch.Tensor:
        return self._noise.normal(f"draft.{name}", torch.arange(rows), width)

    @cached_property
    def _amplitudes(self) -> torch.Tensor:
        """The lengths of the pairs of queries and keys, fp64 [D / 2]."""
        d = self._geometry
        assert d.max_positions is not None
        return self_amplitudes(d, d.max_positions)

    @property
    def _read_length(self) -> float:
        """The length of φ in a normed context, from which values are projected."""
        d = self._geometry
        scale = len(d.aux_layers) * _CONTEXT
        place, constant = scale * math.sqrt(READ_SHARE * (d.hidden - 1)), scale * CONSTANT
        noise = _CONTEXT_NOISE**2 * (d.hidden - 1 - d.head_dim)
        return place * math.sqrt(d.hidden / (place**2 + constant**2 + noise))


DFLASH_SYNTH = SynthDraft(
    geometry=draft_geometry,
    config=draft_config,
    tensors=lambda noise, d, target, rules, _: DFlashWriter(noise, d, rules).tensors(target),
    checkpoint=draft_checkpoint,
    places=block_places,
)
