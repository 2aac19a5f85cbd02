"""Moe: router logits select top-k experts; their gated feed-forward; the weighted sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.moe.body import ACTIVATIONS, GROUP_SCORES, MIN_SUM, body
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.moe.weighted_body import weighted_body
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec

if TYPE_CHECKING:
    import torch


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` best of each row, best first; lower ones win ties."""
    import torch

    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(
    scores: torch.Tensor, groups: int, groups_chosen: int, group_score: str
) -> torch.Tensor:
    """Return ``scores`` [T, E] with −inf outside of the best groups."""
    import torch

    if group_score not in GROUP_SCORES:
        raise ValueError(f"Moe: unknown group_score {group_score!r}")
    by_group = scores.unflatten(1, (groups, -1))
    of_group = by_group.topk(GROUP_SCORES[group_score], dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(of_group).scatter(1, _best(of_group, groups_chosen), 1.0).bool()
    return by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def route(
    router_logits: torch.Tensor,
    top_k: int,
    gating: str,
    choice_bias: torch.Tensor | None = None,
    *,
    groups: int = 1,
    groups_chosen: int = 1,
    group_score: str = "sum_of_two",
    scaling: float = 1.0,
) -> torch.Tensor:
    """Return the weights of all experts [T, E], zero for experts that a row did not select.

    ``softmax_selected``: softmax over the selected logits (GPT-OSS). ``softmax_topk``: softmax over
    all logits, without renormalization. ``sigmoid_norm``: sigmoids, normalized to sum 1 over the
    selected ones. ``sigmoid``: sigmoids without normalization. Ties go to the lower id.

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): ``choice_bias`` [E] is added to the sigmoids for
    the selection, but not to the weights. Experts are in ``groups`` of equal size. A row selects
    the ``groups_chosen`` best groups, and ``top_k`` experts of these. ``scaling`` multiplies the
    weights. ``group_score`` is the sum of a group's two best scores (``sum_of_two``), or its best
    one (``max``, DeepSeek-V2, arXiv 2405.04434, section 2.2.2).
    """
    import torch

    logits = router_logits.float()
    scores = logits if choice_bias is None else logits.sigmoid() + choice_bias.float()
    if groups_chosen < groups:
        scores = _in_best_groups(scores, groups, groups_chosen, group_score)
    chosen = _best(scores, top_k)
    picked = logits.gather(1, chosen)
    if gating == "softmax_selected":
        weights = picked.softmax(dim=-1)
    elif gating == "softmax_topk":
        weights = logits.softmax(dim=-1).gather(1, chosen)
    elif gating == "sigmoid_norm":
        weights = picked.sigmoid() / (picked.sigmoid().sum(dim=-1, keepdim=True) + MIN_SUM)
    elif gating == "sigmoid":
        weights = picked.sigmoid()
    else:
        raise ValueError(f"Moe: unknown gating {gating!r}")
    return torch.zeros_like(logits).scatter(1, chosen, scaling * weights)


def clamped_swiglu(y: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return GPT-OSS's activation [..., I] of [..., 2·I] with gate and up interleaved."""
    gate = y[..., 0::2].clamp(max=limit)
    up = y[..., 1::2].clamp(min=-limit, max=limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)


def swiglu(y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) · up`` [..., I] of [..., 2·I] with gate and up interleaved."""
    gate, up = y[..., 0::2], y[..., 1::2]
    return gate * gate.sigmoid() * up


def geglu(y: torch.Tensor) -> torch.Tensor:
    """Return ``gelu_tanh(gate) · up`` [..., I] of [..., 2·I] with gate and up interleaved."""
    from torch.nn import functional as F

    return F.gelu(y[..., 0::2], approximate="tanh") * y[..., 1::2]


def reference(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    choice_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    *,
    top_k: int,
    gating: str,
    activation: str,
    alpha: float,
    limit: float,
    groups: int = 1,
    groups_chosen: int = 1,
    group_score: str = "sum_of_two",
    scaling: float = 1.0,
) -> torch.Tensor:
    """Return the mixture of experts of ``x`` [T, H], in fp32, with experts added by rising id: [T,
    H].

    Expert e of a row computes ``W2 · act(W1 x + b1) + b2``. The router's weight multiplies the bias
    too (:func:`route`), and so does ``expert_scale`` [E]. ``activation`` is ``swiglu_clamped``, or
    ``swiglu`` or ``geglu_tanh``, which do not use ``alpha`` and ``limit``. Gate and up are
    interleaved in all cases.
    """
    import torch

    if activation not in ACTIVATIONS:
        raise ValueError(f"Moe: unknown activation {activation!r}")
    weights = route(
        router_logits,
        top_k,
        gating,
        choice_bias,
        groups=groups,
        groups_chosen=groups_chosen,
        group_score=group_score,
        scaling=scaling,
    )
    if expert_scale is not None:
        weights = weights * expert_scale.float()
    w1, w2 = expert_weight(gate_up, gate_up_scales), expert_weight(down, down_scales)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        y = x.float() @ w1[expert]
        if gate_up_bias is not None:
            y = y + gate_up_bias[expert].float()
        if activation == "swiglu_clamped":
            h = clamped_swiglu(y, alpha, limit)
        else:
            h = swiglu(y) if activation == "swiglu" else geglu(y)
        z = h @ w2[expert]
        if down_bias is not None:
            z = z + down_bias[expert].float()
        out = out + weights[:, expert : expert + 1] * z
    return out.to(x.dtype)


OP = OpSpec(
    name="Moe",
    doc="Top-k mixture of gated experts; MXFP4 blocks with scales, or plain weights.",
    inputs=(
        TensorSpec("x", "T", ("T", "hidden")),
        TensorSpec("router_logits", "float32", ("T", "experts")),
        TensorSpec("gate_up", "W", rank_free=True),
        TensorSpec("gate_up_scales", "W", ("experts", "two_inner", "blocks_in"), optional=True),
        TensorSpec("gate_up_bias", "W", ("experts", "two_inner"), optional=True),
        TensorSpec("down", "W", rank_free=True),
        TensorSpec("down_scales", "W", ("experts", "hidden", "blocks_inner"), optional=True),
        TensorSpec("down_bias", "W", ("experts", "hidden"), optional=True),
        TensorSpec("choice_bias", "float32", ("experts",), optional=True),
        TensorSpec("expert_scale", "float32", ("experts",), optional=True),
    ),
    outputs=(TensorSpec("y", "T", ("T", "hidden")),),
    attributes=(
        AttributeSpec("top_k", int),
        AttributeSpec("gating", str, "softmax_selected"),
        AttributeSpec("activation", str, "swiglu_clamped"),
        AttributeSpec("alpha", float, 1.702),
        AttributeSpec("limit", float, 7.0),
        AttributeSpec("groups", int, 1),
        AttributeSpec("groups_chosen", int, 1),
        AttributeSpec("group_score", str, "sum_of_two"),
        AttributeSpec("scaling", float, 1.0),
    ),
    reference=reference,
    body=body,
    weighted_body=weighted_body,
)
