"""RmsMoe: norm, router, the chosen experts and the residual, as one op of a CUDA engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.moe.op import reference as moe_reference
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_moe.lowering import lower, tactics
from specbuild.plugins_cuda.rms_moe.packing import (
    unpack_down,
    unpack_down_values,
    unpack_gate_up,
    unpack_gate_up_bias,
    unpack_gate_up_values,
)
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.traffic import (
    Routing,
    TrafficRequest,
    product_terms,
    stored_terms,
)
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch


def router_input(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rounding: str = "gpt_oss",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed rows [T, H] in x's type and their router logits fp32 [T, E].

    The norm is that of ``rounding`` (``rms_norms.py``). The logits are
    summed in fp32, rounded to x's type as a linear layer's output is, and widened.
    """
    from torch.nn import functional as F

    normed = rms_norm(x, norm, eps, rounding)
    logits = F.linear(normed.float(), weight.float(), bias.float()).to(x.dtype).float()
    return normed, logits


def reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    row_start: torch.Tensor,  # noqa: ARG001  rows past the last one are unspecified
    *,
    eps: float,
    top_k: int,
    alpha: float,
    limit: float,
    gating: str,
    rounding: str,
    activation: str,
) -> torch.Tensor:
    """``x`` [T, H] → ``x + moe(rms(x))`` [T, H]; the experts' sum is rounded before the add.

    ``gate_up``, ``gate_up_bias`` and ``down`` are packed (``packing.py``): u8 is MXFP4.
    """
    normed, logits = router_input(x, norm, router_weight, router_bias, eps, rounding)
    inner = gate_up_bias.shape[1] // 2
    first, second = _unpacked(gate_up, down, inner)
    experts = moe_reference(
        normed,
        logits,
        *first,
        unpack_gate_up_bias(gate_up_bias),
        *second,
        down_bias,
        top_k=top_k,
        gating=gating,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    return x + experts


def _unpacked(
    gate_up: torch.Tensor, down: torch.Tensor, inner: int
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]:
    """Both weights as Moe takes them, each with its scales where it has some."""
    import torch

    if gate_up.dtype == torch.uint8:
        return unpack_gate_up(gate_up), unpack_down(down, inner)
    return (unpack_gate_up_values(gate_up), None), (unpack_down_values(down, inner), None)


def traffic(request: TrafficRequest) -> Traffic:
    """Experts that some row chose are read once; a row multiplies with ``top_k`` of them."""
    sizes, top_k = request.tensors, int(request.attributes["top_k"])
    experts, two_inner = sizes["gate_up_bias"].shape
    weights = ("gate_up", "gate_up_bias", "down", "down_bias")
    an_expert = sum(sizes[name].nbytes // experts for name in weights)
    # Gate, up and down: a product and a sum for every element.
    operations = 2 * top_k * 3 * (two_inner // 2) * sizes["x"].shape[1]
    return Traffic(
        read=(
            *stored_terms(request, besides=weights),
            Term("experts", an_expert, "chosen_expert"),
        ),
        operations=(
            *product_terms(request, ("router_weight",)),
            Term("experts", operations, "row"),
        ),
        experts=experts,
        experts_per_token=top_k,
    )


OP = OpSpec(
    name="RmsMoe",
    doc="x + moe(rms(x)), experts packed in MXFP4 or bf16; rows past row_start's last are "
    "unspecified.",
    inputs=(
        TensorSpec("x", "T", ("T", "hidden")),
        TensorSpec("norm", "W", ("hidden",)),
        TensorSpec("router_weight", "W", ("experts", "hidden")),
        TensorSpec("router_bias", "W", ("experts",)),
        TensorSpec("gate_up", "W", ("experts", "gate_up_tiles", "gate_up_tile_bytes")),
        TensorSpec("gate_up_bias", "W", ("experts", "two_inner")),
        TensorSpec("down", "W", ("experts", "down_tiles", "down_tile_bytes")),
        TensorSpec("down_bias", "W", ("experts", "hidden")),
        TensorSpec("row_start", "int32", ("B1",)),
    ),
    outputs=(TensorSpec("y", "T", ("T", "hidden")),),
    attributes=(
        AttributeSpec("eps", float),
        AttributeSpec("top_k", int),
        AttributeSpec("alpha", float, 1.702),
        AttributeSpec("limit", float, 7.0),
        AttributeSpec("gating", str, "softmax_selected"),
        AttributeSpec("rounding", str, "gpt_oss"),
        AttributeSpec("activation", str, "swiglu_clamped"),
    ),
    reference=reference,
    lower=lower,
    tactics=tactics,
    routing=Routing(logits="workspace_logits", row_start="row_start"),
    traffic=traffic,
)
