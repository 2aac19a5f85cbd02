"""Lowers every ``specbuild::`` op to standard ONNX ops that TensorRT-RTX's parser accepts.

An op's body is used if it consists of such ops. The versions here keep the graph's activation dtype
(engines are strongly typed), call ``Attention``, which becomes the library's fused layer, and keep
MXFP4 experts in 4 or 8 bits. They use neither unsigned integers nor bitwise ops.

Alternatives that do not work: the library's MoE layer is not implemented for the GPUs of
TensorRT-RTX 1.7. Its KV-cache update writes one consecutive range per sequence, but our slots are
scattered over pages. TopK is limited to 3840.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import onnx_ir as ir
import torch

from specbuild.builder.backends.tensorrt.standard.attention import attention, latent_attention
from specbuild.builder.backends.tensorrt.standard.choose import choose
from specbuild.builder.graph.passes.rewriting import replace
from specbuild.builder.graph.passes.weights import derive
from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.moe.body import routing
from specbuild.plugins_cuda.moe.e2m1 import E2M1_CODES
from specbuild.plugins_cuda.opspec import DOMAIN
from specbuild.plugins_cuda.registry import op_named

Inputs: TypeAlias = Sequence[ir.Value | None]
Attributes: TypeAlias = Mapping[str, Any]

FLOAT = ir.DataType.FLOAT
MXFP4_BLOCK = 32


@dataclass(frozen=True)
class ExpertStorage:
    """The exact format of quantized MXFP4 values in an engine.

    A value is ``code · 2^(scale − bias)``. ``table`` maps e2m1 codes to stored codes; None keeps
    the checkpoint's bytes.
    """

    dtype: ir.DataType
    bias: int
    table: tuple[int, ...] | None


# Doubled e2m1 values are integers, so eight bits store them exactly on GPUs without e2m1.
FP4 = ExpertStorage(ir.DataType.FLOAT4E2M1, 127, None)
INT8 = ExpertStorage(ir.DataType.INT8, 128, tuple(int(2 * value) for value in E2M1_CODES))


def lower_standard(model: ir.Model, storage: ExpertStorage) -> int:
    """Replace every ``specbuild::`` node by standard ops, and return the number of nodes."""
    changed = 0
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        op = op_named(node.op_type)
        attributes = op.complete(
            {name: attribute.value for name, attribute in node.attributes.items()}
        )
        inputs = [*node.inputs, *[None] * (len(op.inputs) - len(node.inputs))]
        b = BodyBuilder()
        if op.name == "Moe":
            outputs = moe(b, inputs, attributes, model.graph, storage)
        else:
            body = LOWERINGS.get(op.name, op.body)
            assert body is not None
            outputs = body(b, inputs, attributes)
        replace(node, b, outputs, model.graph)
        changed += 1
    model.graph.opset_imports.pop(DOMAIN, None)
    return changed


def moe(
    b: BodyBuilder,
    inputs: Inputs,
    attributes: Attributes,
    graph: ir.Graph,
    storage: ExpertStorage,
) -> Sequence[ir.Value]:
    """Compute Moe over all experts: products in the activation dtype, everything else in fp32."""
    x, logits, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = inputs[:8]
    assert x is not None and logits is not None and gate_up is not None and down is not None
    assert x.dtype is not None
    if attributes["activation"] != "swiglu_clamped":
        raise ValueError(f"Moe: unknown activation {attributes['activation']!r}")
    routing_weights = routing(b, logits, inputs[8], attributes, experts=static_size(logits, 1))
    weight = partial(_expert_weight, b, graph=graph, storage=storage, dtype=x.dtype)
    y = b.cast(b.MatMul(b.Unsqueeze(x, b.i64(0)), weight(gate_up, gate_up_scales)), FLOAT)
    if gate_up_bias is not None:
        y = b.Add(y, b.Unsqueeze(b.cast(gate_up_bias, FLOAT), b.i64(1)))
    h = _clamped_swiglu(b, y, float(attributes["alpha"]), float(attributes["limit"]))
    z = b.cast(b.MatMul(b.cast(h, x.dtype), weight(down, down_scales)), FLOAT)
    if down_bias is not None:
        z = b.Add(z, b.Unsqueeze(b.cast(down_bias, FLOAT), b.i64(1)))
    of_experts = b.Unsqueeze(b.Transpose(routing_weights, perm=[1, 0]), b.i64(2))
    total = b.ReduceSum(b.Mul(z, of_experts), b.i64(0), keepdims=0)
    return [b.cast(total, x.dtype)]


def _clamped_swiglu(b: BodyBuilder, y: ir.Value, alpha: float, limit: float) -> ir.Value:
    """GPT-OSS's activation of fp32 [E, T, 2·I], interleaved gate and up, giving [E, T, I]."""
    axis, stop, step = b.i64(2), b.i64(2**31 - 1), b.i64(2)
    bound = b.scalar(limit)
    gate = b.Min(b.Slice(y, b.i64(0), stop, axis, step), bound)
    up = b.Max(b.Min(b.Slice(y, b.i64(1), stop, axis, step), bound), b.scalar(-limit))
    sigmoid = b.Sigmoid(b.Mul(gate, b.scalar(alpha)))
    return b.Mul(b.Mul(gate, sigmoid), b.Add(up, b.scalar(1.0)))


def _expert_weight(
    b: BodyBuilder,
    weight: ir.Value,
    scales: ir.Value | None,
    *,
    graph: ir.Graph,
    storage: ExpertStorage,
    dtype: ir.DataType,
) -> ir.Value:
    """Return an expert weight [E, in, out] in ``dtype``; MXFP4 is dequantized at its use."""
    if scales is None:
        return weight if weight.dtype == dtype else b.cast(weight, dtype)
    assert weight.name is not None and scales.name is not None
    codes = _stored_codes(graph, weight, storage)
    steps = derive(
        graph,
        f"{scales.name}.{storage.dtype.name.lower()}.{dtype.name.lower()}",
        [scales],
        lambda s: torch.exp2(s.float() - storage.bias).to(_TORCH_TYPES[dtype]),
    )
    dequantized = b.DequantizeLinear(codes, steps, axis=2, block_size=MXFP4_BLOCK)
    return b.Transpose(dequantized, perm=[0, 2, 1])


def _stored_codes(graph: ir.Graph, weight: ir.Value, storage: ExpertStorage) -> ir.Value:
    """Return blocks u8 [E, out, in/32, 16] as quantized values [E, out, in] of the stored type."""
    experts, rows, blocks = (static_size(weight, axis) for axis in range(3))
    name = f"{weight.name}.{storage.dtype.name.lower()}"
    codes = derive(graph, name, [weight], partial(_packed, table=storage.table))
    codes.type = ir.TensorType(storage.dtype)
    codes.shape = ir.Shape([experts, rows, blocks * MXFP4_BLOCK])
    return codes


def _packed(blocks: torch.Tensor, table: tuple[int, ...] | None) -> torch.Tensor:
    """Return two e2m1 codes per byte, low nibble first, or one stored code per byte."""
    if table is None:
        return blocks.flatten(2)
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2)
    return torch.tensor(table, dtype=torch.int8, device=blocks.device)[nibbles.int()]


_TORCH_TYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}
LOWERINGS: Mapping[str, Callable[..., Sequence[ir.Value]]] = {
    "PagedTreeAttention": attention,
    "MlaAttention": latent_attention,
    "Choose": choose,
}
