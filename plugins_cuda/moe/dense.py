"""Moe as two Gemms over all experts at once, with constants folded into the weights.

With few or narrow experts, a CPU is faster if it computes all of them and weights the others with
0. The gate is scaled by alpha before the activation and by 1/alpha after it. Then ``g ·
sigmoid(alpha · g)`` is QuickGelu with alpha 1. The +1 of ``up + 1`` is added to its bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder
from specbuild.plugins_cuda.moe.body import routing
from specbuild.plugins_cuda.moe.expert_weight import expert_weight

if TYPE_CHECKING:
    import torch


def dense_weights(
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *,
    alpha: float,
    activation: str,
) -> dict[str, torch.Tensor]:
    """Convert the op's weights to fp32 matrices for :func:`dense_body`.

    ``w1`` [H, 2·E·I] and ``b1`` [2·E·I]: all gates times alpha, then all ups with 1 added to the
    bias. ``w2`` [E·I, H], divided by alpha. ``b2`` [E, H]. ``spread`` is :func:`dense_spread`. For
    ``swiglu`` alpha is 1, and nothing is added to the ups.
    """
    import torch

    alpha, shift = (1.0, 0.0) if activation == "swiglu" else (alpha, 1.0)
    w1, w2 = expert_weight(gate_up, gate_up_scales), expert_weight(down, down_scales)
    experts, hidden, two_inner = w1.shape
    inner = two_inner // 2
    b1 = torch.zeros(experts, two_inner) if gate_up_bias is None else gate_up_bias.float()
    gates = w1[..., 0::2].permute(1, 0, 2).reshape(hidden, -1) * alpha
    ups = w1[..., 1::2].permute(1, 0, 2).reshape(hidden, -1)
    return {
        "w1": torch.cat([gates, ups], dim=1),
        "b1": torch.cat([b1[:, 0::2].flatten() * alpha, b1[:, 1::2].flatten() + shift]),
        "w2": w2.reshape(experts * inner, hidden) / alpha,
        "b2": torch.zeros(experts, hidden) if down_bias is None else down_bias.float().clone(),
        "spread": dense_spread(experts, inner),
    }


def dense_spread(experts: int, inner: int) -> torch.Tensor:
    """Return [E, E·I], which repeats a row's expert weight over that expert's inner columns."""
    import torch

    return torch.eye(experts).repeat_interleave(inner, dim=1)


def dense_body(
    b: BodyBuilder,
    x: ir.Value,
    router_logits: ir.Value,
    choice_bias: ir.Value | None,
    weights: Mapping[str, ir.Value],
    attributes: Mapping[str, Any],
    *,
    experts: int,
) -> ir.Value:
    """Compute ``x`` [T, H] with ``router_logits`` [T, E] and :func:`dense_weights`: [T, H]."""
    alpha, limit = float(attributes["alpha"]), float(attributes["limit"])
    chosen = routing(b, router_logits, choice_bias, attributes, experts=experts)
    y = b.Gemm(x, weights["w1"], weights["b1"])
    gate, up = b.Split(y, outputs=2, axis=1, num_outputs=2)
    clamped = attributes["activation"] != "swiglu"
    if clamped:
        gate = b.Clip(gate, None, b.scalar(alpha * limit))
        up = b.Clip(up, b.scalar(1 - limit), b.scalar(1 + limit))
    gate = b.QuickGelu(gate, domain=CONTRIB_DOMAIN, alpha=1.0)
    h = b.Mul(b.Mul(gate, up), b.MatMul(chosen, weights["spread"]))
    return b.Gemm(h, weights["w2"], b.MatMul(chosen, weights["b2"]))
