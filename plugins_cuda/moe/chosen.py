"""Moe as a loop over the selected experts, each with its rows only.

SwiGLU is the only gated activation of ONNX Runtime's ``MoE``, which also does not support negative
router weights. This body supports any activation and any weights, and reads only selected experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from specbuild.plugins_cuda.body import FLOAT, INT64, BodyBuilder, static_size
from specbuild.plugins_cuda.moe.body import gated, routing
from specbuild.plugins_cuda.moe.expert_weight import expert_weight

if TYPE_CHECKING:
    import torch


def chosen_weights(
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Convert the op's weights to fp32 for :func:`chosen_body`, with all gates before all ups.

    ``w1`` [E, H, 2·I], ``b1`` [E, 2·I], ``w2`` [E, I, H], ``b2`` [E, H].
    """
    import torch

    w1, w2 = expert_weight(gate_up, gate_up_scales), expert_weight(down, down_scales)
    experts, _, two_inner = w1.shape
    b1 = torch.zeros(experts, two_inner) if gate_up_bias is None else gate_up_bias.float()
    b2 = torch.zeros(experts, w2.shape[2]) if down_bias is None else down_bias.float()
    return {
        "w1": torch.cat([w1[..., 0::2], w1[..., 1::2]], dim=-1).contiguous(),
        "b1": torch.cat([b1[..., 0::2], b1[..., 1::2]], dim=-1).contiguous(),
        "w2": w2.contiguous(),
        "b2": b2.contiguous(),
    }


def chosen_body(
    b: BodyBuilder,
    x: ir.Value,
    router: Sequence[ir.Value | None],
    weights: Mapping[str, ir.Value],
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Compute ``x`` [T, H] → [T, H] with :func:`chosen_weights`.

    ``router`` has the logits [T, E], the selection bias of experts, and the factor of each expert.
    """
    logits, choice_bias, scale = router
    assert logits is not None
    experts = static_size(logits, 1)
    routed = routing(b, logits, choice_bias, attributes, experts=experts, scale=scale)
    by_expert = b.Transpose(routed, perm=[1, 0])
    largest = b.ReduceMax(b.Abs(by_expert), b.i64(1), keepdims=0)
    used = b.reshape(b.NonZero(largest), -1)

    def step(inner: BodyBuilder, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
        total, place = state
        expert = inner.Gather(used, inner.cast(place, INT64))
        share = inner.Gather(by_expert, expert)
        rows = inner.reshape(inner.NonZero(share), -1)
        y = inner.MatMul(inner.Gather(x, rows), inner.Gather(weights["w1"], expert))
        y = inner.Add(y, inner.Gather(weights["b1"], expert))
        gate, up = inner.Split(y, outputs=2, axis=1, num_outputs=2)
        h = gated(inner, gate, up, attributes)
        z = inner.MatMul(h, inner.Gather(weights["w2"], expert))
        z = inner.Add(z, inner.Gather(weights["b2"], expert))
        z = inner.Mul(z, inner.Unsqueeze(inner.Gather(share, rows), inner.i64(1)))
        summed = inner.ScatterND(total, inner.Unsqueeze(rows, inner.i64(1)), z, reduction="add")
        return summed, inner.Add(place, inner.scalar(1.0))

    times = b.Squeeze(b.Shape(used), b.i64(0))
    total, _ = b.repeat(times, [b.Sub(x, x), b.scalar(0.0)], FLOAT, step)
    return total
