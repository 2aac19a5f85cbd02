"""RmsMoe: norm, router, the selected experts and the residual, as one op of a CUDA engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.linear.storage import BF16, MXFP4, Storage
from specbuild.plugins_cuda.moe.op import reference as moe_reference
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_moe.choice import expert_groups
from specbuild.plugins_cuda.rms_moe.expert_codes import decoded_experts, storage_of_experts
from specbuild.plugins_cuda.rms_moe.lowering import lower, tactics
from specbuild.plugins_cuda.rms_moe.packing import (
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
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
    terms,
)
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch

LOGITS = ("rounded", "fp32")
# Rounding of a router's norm: its weight is fp32, and the product is rounded once.
_ROUTER_ROUNDING = "gpt_oss"
# The selection from one expert: every row has it, with weight 1.
_ALL_ROWS = {
    "top_k": 1,
    "gating": "softmax_selected",
    "groups": 1,
    "groups_chosen": 1,
    "scaling": 1.0,
}


def router_input(
    x: torch.Tensor,
    norm: torch.Tensor,
    router: Sequence[torch.Tensor | None],
    eps: float,
    rounding: str = "gpt_oss",
    logits: str = "rounded",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed rows [T, H] in x's type and their router logits fp32 [T, E].

    ``router`` is its weight, its bias and, if its input has another norm, this norm [H] fp32. The
    other norm is that of ``rounding`` (``rms_norms.py``). The logits are summed in fp32.
    ``rounded`` logits are rounded to x's type, like a linear layer's output, and widened; ``fp32``
    ones are not.
    """
    from torch.nn import functional as F

    if logits not in LOGITS:
        raise ValueError(f"RmsMoe: unknown logits {logits!r}")
    weight, bias, own_norm = (*router, None)[:3]
    assert weight is not None and bias is not None
    normed = read = rms_norm(x, norm, eps, rounding)
    if own_norm is not None:
        read = rms_norm(x, own_norm, eps, _ROUTER_ROUNDING)
    exact = F.linear(read.float(), weight.float(), bias.float())
    return normed, exact if logits == "fp32" else exact.to(x.dtype).float()


def experts_sum(
    inputs: Sequence[Any],
    *,
    eps: float,
    rounding: str,
    logits: str,
    shared: int,
    **choice: Any,
) -> torch.Tensor:
    """Return ``moe(rms(x))`` [T, H] in fp32, not rounded, of the op's ``inputs`` in order.

    ``gate_up``, ``gate_up_bias`` and ``down`` are packed (``packing.py``, ``expert_codes.py``). The
    last ``shared`` experts apply to every row, with weight 1 or, with ``shared_gates``, the sigmoid
    of their logits, the router's last. ``choice`` has attributes of ``Moe``.
    """
    x, norm, router_weight, router_bias, gate_up, gate_up_bias, down, down_bias = inputs[:8]
    # Rows after the last entry of row_start, the ninth input, are unspecified.
    choice_bias, own_norm, expert_scale = (*inputs[9:], None, None, None)[:3]
    router = (router_weight, router_bias, own_norm)
    normed, of_router = router_input(x, norm, router, eps, rounding, logits)
    routed, has_gates = gate_up.shape[0] - shared, choice.pop("shared_gates", 0)
    if of_router.shape[1] != routed + shared * has_gates:
        raise ValueError(f"RmsMoe: {routed} routed experts, {of_router.shape[1]} logits of a row")
    rows, inner, hidden = normed.float(), gate_up_bias.shape[1] // 2, normed.shape[1]

    def mixed(
        some: slice, scores: torch.Tensor, of_choice: Sequence[Any], how: dict[str, Any]
    ) -> torch.Tensor:
        w1, s1 = _unpacked_gate_up(gate_up[some], inner, hidden)
        w2, s2 = _unpacked_down(down[some], inner, hidden)
        b1, b2 = unpack_gate_up_bias(gate_up_bias)[some], down_bias[some]
        return moe_reference(rows, scores, w1, s1, b1, w2, s2, b2, *of_choice, **how)

    experts = mixed(slice(routed), of_router[:, :routed], (choice_bias, expert_scale), choice)
    certain, how = of_router.new_zeros(len(x), 1), {**choice, **_ALL_ROWS}
    for one in range(routed, routed + shared):
        weight = of_router[:, one, None].sigmoid() if has_gates else 1.0
        experts = experts + weight * mixed(slice(one, one + 1), certain, (), how)
    return experts


def reference(
    x: torch.Tensor, *inputs: torch.Tensor | None, residual: int = 1, **attributes: Any
) -> torch.Tensor:
    """Return ``x + moe(rms(x))`` [T, H]; the experts' sum is rounded before the addition.

    With ``residual`` 0 the result is the rounded sum. Other inputs and attributes are those of
    :func:`experts_sum`.
    """
    experts = experts_sum((x, *inputs), **attributes).to(x.dtype)
    return x + experts if residual else experts


_Unpacked: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


def _unpacked_gate_up(packed: torch.Tensor, inner: int, hidden: int) -> _Unpacked:
    """Return gate/up in the format of Moe, with its scales if there are any."""
    tiles, steps = inner // TILE_OUTPUTS, gate_up_steps(hidden)
    storage = _storage(packed, tiles, steps)
    if storage is MXFP4:
        return unpack_gate_up(packed)
    values = packed if storage is BF16 else decoded_experts(packed, tiles, steps, storage)
    return unpack_gate_up_values(values), None


def _unpacked_down(packed: torch.Tensor, inner: int, hidden: int) -> _Unpacked:
    """Return down in the format of Moe."""
    tiles, steps = hidden // TILE_OUTPUTS, down_steps(inner)
    storage = _storage(packed, tiles, steps)
    if storage is MXFP4:
        return unpack_down(packed, inner)
    values = packed if storage is BF16 else decoded_experts(packed, tiles, steps, storage)
    return unpack_down_values(values, inner), None


def _storage(packed: torch.Tensor, tiles: int, steps: int) -> Storage:
    is_bf16 = packed.dtype.is_floating_point
    dtype = "bfloat16" if is_bf16 else str(packed.dtype).removeprefix("torch.")
    return storage_of_experts(TensorInfo(tuple(packed.shape), dtype), len(packed), tiles, steps)


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: each selected expert is read once, shared experts in every pass.

    A row is multiplied by ``top_k`` experts and the shared ones.
    """
    sizes, top_k = request.tensors, int(request.attributes["top_k"])
    shared = int(request.attributes["shared"])
    experts, two_inner = sizes["gate_up_bias"].shape
    weights = ("gate_up", "gate_up_bias", "down", "down_bias")
    an_expert = sum(sizes[name].nbytes // experts for name in weights)
    # Gate, up and down: a product and an addition for every element.
    operations = 2 * 3 * (two_inner // 2) * sizes["x"].shape[1]
    return Traffic(
        read=(
            *stored_terms(request, besides=weights),
            *terms(Term("dense", shared * an_expert, "pass")),
            Term("experts", an_expert, "chosen_expert"),
        ),
        operations=(
            *product_terms(request, ("router_weight",)),
            *terms(Term("dense", shared * operations, "row")),
            Term("experts", top_k * operations, "row"),
        ),
        experts=experts - shared,
        experts_per_token=top_k,
        shared_experts=shared,
    )


OP = OpSpec(
    name="RmsMoe",
    doc="x + moe(rms(x)), experts packed in MXFP4, bf16 or quantized values; rows past "
    "row_start's last are unspecified.",
    inputs=(
        TensorSpec("x", "T", ("T", "hidden")),
        TensorSpec("norm", "W", ("hidden",)),
        TensorSpec("router_weight", "W", ("router_rows", "hidden")),
        TensorSpec("router_bias", "W", ("router_rows",)),
        TensorSpec("gate_up", "W", ("all_experts", "gate_up_tiles", "gate_up_tile_bytes")),
        TensorSpec("gate_up_bias", "W", ("all_experts", "two_inner")),
        TensorSpec("down", "W", ("all_experts", "down_tiles", "down_tile_bytes")),
        TensorSpec("down_bias", "W", ("all_experts", "hidden")),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("choice_bias", "float32", ("experts",), optional=True),
        TensorSpec("router_norm", "float32", ("hidden",), optional=True),
        TensorSpec("expert_scale", "float32", ("experts",), optional=True),
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
        AttributeSpec("logits", str, "rounded"),
        AttributeSpec("groups", int, 1),
        AttributeSpec("groups_chosen", int, 1),
        AttributeSpec("group_score", str, "sum_of_two"),
        AttributeSpec("scaling", float, 1.0),
        AttributeSpec("shared", int, 0),
        AttributeSpec("shared_gates", int, 0),
        AttributeSpec("residual", int, 1),
    ),
    reference=reference,
    lower=lower,
    tactics=tactics,
    routing=Routing(logits="workspace_logits", row_start="row_start", groups=expert_groups),
    traffic=traffic,
)
