"""Moe as ONNX Runtime's ``com.microsoft.MoE``, which computes only the selected experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, BodyBuilder
from specbuild.plugins_cuda.moe.body import UNCHOSEN, routing
from specbuild.plugins_cuda.moe.expert_weight import expert_weight

if TYPE_CHECKING:
    import torch

# With more inner columns over all experts, computing only the selected ones is faster.
DENSE_COLUMNS = 512


def cpu_form(experts: int, inner: int) -> Literal["dense", "contrib"]:
    """Return the body that is faster on a CPU."""
    return "dense" if experts * inner <= DENSE_COLUMNS else "contrib"


def contrib_weights(
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Convert the op's weights to fp32 for :func:`contrib_body`.

    ``w1`` [E, 2·I, H] (gate and up interleaved), ``b1`` [E, 2·I], ``w2`` [E, H, I], ``b2`` [E, H].
    """
    import torch

    w1, w2 = expert_weight(gate_up, gate_up_scales), expert_weight(down, down_scales)
    experts, _, two_inner = w1.shape
    b1 = torch.zeros(experts, two_inner) if gate_up_bias is None else gate_up_bias.float()
    b2 = torch.zeros(experts, w2.shape[2]) if down_bias is None else down_bias.float()
    return {
        "w1": w1.transpose(1, 2).contiguous(),
        "b1": b1.contiguous(),
        "w2": w2.transpose(1, 2).contiguous(),
        "b2": b2.contiguous(),
    }


def without_ties(b: BodyBuilder, logits: ir.Value, top_k: int) -> ir.Value:
    """Lower all logits except the selected ones, because ONNX Runtime breaks ties differently."""
    picked, chosen = b.topk(logits, b.i64(top_k))
    low = b.ConstantOfShape(b.Shape(logits), value=ir.tensor([UNCHOSEN], dtype=ir.DataType.FLOAT))
    return b.ScatterElements(low, chosen, picked, axis=1)


def as_logits(b: BodyBuilder, routed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return logits whose softmax is ``routed`` [T, E] / its sum, and that sum, [T, 1].

    The weights of ONNX Runtime's op are a softmax over the selected experts; other weights are
    passed as logarithms.
    """
    zero = b.scalar(0.0)
    logits = b.Where(b.Greater(routed, zero), b.Log(routed), b.scalar(UNCHOSEN))
    return logits, b.ReduceSum(routed, b.i64(1), keepdims=1)


def contrib_body(
    b: BodyBuilder,
    x: ir.Value,
    router_logits: ir.Value,
    choice_bias: ir.Value | None,
    weights: Mapping[str, ir.Value],
    attributes: Mapping[str, Any],
    *,
    experts: int,
) -> ir.Value:
    """Compute ``x`` [T, H] with ``router_logits`` [T, E] and :func:`contrib_weights`: [T, H]."""
    top_k = int(attributes["top_k"])
    is_supported = attributes["gating"] == "softmax_selected" and choice_bias is None
    is_supported = is_supported and attributes["scaling"] == 1.0
    is_supported = is_supported and attributes["groups_chosen"] == attributes["groups"]
    total = None
    if not is_supported:
        routed = routing(b, router_logits, choice_bias, attributes, experts=experts)
        router_logits, total = as_logits(b, routed)
    elif top_k < experts:
        router_logits = without_ties(b, router_logits, top_k)
    activation: dict[str, float] = {"activation_alpha": 1.0, "activation_beta": 0.0}
    if attributes["activation"] != "swiglu":
        activation = {
            "activation_alpha": float(attributes["alpha"]),
            "activation_beta": 1.0,
            "swiglu_limit": float(attributes["limit"]),
        }
    y = b.MoE(
        x,
        router_logits,
        weights["w1"],
        weights["b1"],
        weights["w2"],
        weights["b2"],
        domain=CONTRIB_DOMAIN,
        k=top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        **activation,
    )
    return y if total is None else b.Mul(y, total)
