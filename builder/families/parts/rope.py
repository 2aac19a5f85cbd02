"""Rotary embedding, half-split, with all scalings of supported configurations."""

from __future__ import annotations

import math

import torch

from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return angles per position, fp64 [head_dim / 2].

    YaRN mixes ``1/freq`` (fast channels) with ``1/(factor·freq)`` (slow ones). Its ramp is between
    the channels that rotate ``beta_fast`` and ``beta_slow`` times over the original context.
    """
    half, theta = head_dim // 2, rope.theta
    if isinstance(rope.scaling, DynamicScaling):
        theta *= _ntk_growth(rope.scaling) ** (head_dim / (head_dim - 2))
    freq = theta ** (torch.arange(half, dtype=torch.float64) * 2 / head_dim)
    if rope.scaling is None or isinstance(rope.scaling, DynamicScaling):
        return 1.0 / freq
    if isinstance(rope.scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(rope.scaling.factors, dtype=torch.float64) * freq)
    if isinstance(rope.scaling, LinearScaling):
        return 1.0 / (rope.scaling.factor * freq)
    if isinstance(rope.scaling, ProportionalScaling):
        is_rotated = torch.arange(half) < int(rope.scaling.share * head_dim / 2)
        return is_rotated / (rope.scaling.factor * freq)
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(rope.scaling, 1.0 / freq)
    yarn = rope.scaling

    def channel(turns: float) -> float:
        wavelength = yarn.original_max_positions / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(rope.theta)

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal bounds would divide by zero, so the ramp becomes a step.
    ramp = (torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)
    fast = 1.0 - ramp.clamp(0, 1)
    return fast / freq + (1.0 - fast) / (yarn.factor * freq)


def _ntk_growth(scaling: DynamicScaling) -> float:
    """Return the factor of theta before its exponent: 1 within the original context."""
    length = max(scaling.longest, scaling.original_max_positions)
    return scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)


def _llama3(scaling: Llama3Scaling, plain: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by ``factor``, keep high ones, and interpolate between them."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_max_positions * plain / (2 * math.pi)  # in the original context
    weight = ((waves - low) / (high - low)).clamp(0, 1)
    return weight * plain + (1.0 - weight) * plain / scaling.factor


def rope_tables(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, fp32 [positions, head_dim / 2], times the attention factor."""
    angle = torch.outer(
        torch.arange(positions, dtype=torch.float64), inverse_frequencies(rope, head_dim)
    )
    return (
        (angle.cos() * rope.attention_factor).float(),
        (angle.sin() * rope.attention_factor).float(),
    )


def rotate(
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    heads: int,
    width: int = 0,
) -> torch.Tensor:
    """Rotate ``x`` [T, heads·D], half-split, at ``positions`` [T] → [T, heads, D], in fp32.

    Only the first ``width`` values of a head are rotated; 0 is all.
    """
    cos, sin = tables
    rotated = torch.onnx.ops.rotary_embedding(
        x.float().unsqueeze(0),
        cos,
        sin,
        positions.long().unsqueeze(0),
        num_heads=heads,
        rotary_embedding_dim=width,
    )
    return rotated.to(x.dtype).view(x.shape[0], heads, -1)
