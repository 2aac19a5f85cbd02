"""Weights of synthetic layers with a SwiGLU or experts, with Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from specbuild.builder.synth.fill import BIAS_STD, Fill
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.geometry import TargetGeometry

_GATED_RMS = 0.6  # the rms of silu(gate)·up, if both have rms 1


# The norms of the outputs of attention and feed-forward.
_OUTPUT_NORMS = tuple(f"post_{part}_layernorm.weight" for part in ("attention", "feedforward"))


def layer_tensor(
    fill: Fill,
    g: TargetGeometry,
    name: str,
    shape: tuple[int, ...],
    norms_less: float = 0.0,
) -> SynthTensor:
    """Return the tensor of this name: a norm, a router, a bias, or a projection.

    Checkpoints store the weights of norms minus ``norms_less``.
    """
    if g.norm_places != "inputs" and name.endswith(_OUTPUT_NORMS):
        return fill.norm(name, shape, fill.contribution, less=norms_less)
    if name.endswith("norm.weight"):
        return fill.norm(name, shape, less=norms_less)
    if name.endswith(".mlp.gate.weight"):
        return fill.router(name, shape)
    if name.endswith("bias"):
        return fill.normal(name, shape, BIAS_STD)
    std = 1 / math.sqrt(shape[1])
    if name.endswith("o_proj.weight"):
        std *= fill.contribution
    if name.endswith("down_proj.weight"):
        std *= fill.contribution / _GATED_RMS
    return fill.normal(name, shape, std)


def gate_logits(load: Callable[[str], torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, E] of a router without bias, for normed rows [n, H]."""
    return normed @ load("mlp.gate.weight").T
