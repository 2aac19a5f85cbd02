"""Replaces GatedDelta, its projections and its gated norm by a Linear and LazyGatedDelta."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import (
    ROWS,
    as_bf16,
    as_fp32,
    packed,
    place,
    static,
    stem,
)
from specbuild.builder.backends.cuda.fusions.matching import (
    layout_origin,
    linear_of,
    origin,
    origin_node,
    read_norm,
)
from specbuild.builder.graph.passes.rewriting import take_place
from specbuild.plugins_cuda.linear.packing import TILE_ROWS, pack_rows
from specbuild.runtime.engine_dir.manifest import STATE_GROUP

# The ranks of inputs that describe the rows of a launch, and the states of sequences.
_LAUNCH = {"positions": 1, "row_start": 1, "ancestor_bits": 2}
STATE_INPUTS = {"state_slot": 1, "replay_path": 2, "replay_count": 1}
# The factors that a layer saves for the rows of the last step.
FACTOR_POOL = "factor_pool"


def fuse_gated_delta(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace ``norm(GatedDelta(x · Wᵀ, …)) · silu(x · Zᵀ)``."""
    if node.op_type != "GatedDelta":
        return False
    rows, conv, scale, bias, _, _, _, tail_pool, state_pool = node.inputs
    in_proj, norm_node = (
        linear_of(rows),
        next(user for user in node.outputs[0].consumers() if user.op_type == "RMSNormalization"),
    )
    norm, gated = read_norm(norm_node), _gated(norm_node)
    silu = next(filter(None, (origin_node(value, "Mul") for value in gated.inputs)), None)
    gate = None if silu is None else linear_of(silu.inputs[0])
    if in_proj is None or gate is None or not norm.casts_first:
        raise AssertionError("GatedDelta needs projections before it and a LLaMA norm after it")
    assert tail_pool is not None and state_pool is not None and rows is not None
    channels, values = static(tail_pool, 2), static(gate.inputs[1], 0)
    weights = [in_proj.inputs[1], gate.inputs[1]]
    joined = packed(
        graph,
        f"{stem(weights[0])}.with_gate.packed",
        weights,
        partial(_joined, channels=channels),
    )
    (projected,) = place(
        node,
        "Linear",
        {"x": origin(in_proj.inputs[0]), "weight": joined},
        [(ROWS, static(joined, 0) * TILE_ROWS)],
    )
    pool = _factor_pool(graph, tail_pool)
    output, tail, state, _ = place(
        gated,
        "LazyGatedDelta",
        {
            "rows": projected,
            "conv_weight": as_bf16(conv),
            "decay_scale": as_fp32(scale),
            "dt_bias": as_fp32(bias),
            "norm": as_bf16(norm.weight),
            **{name: _input(graph, name, rank) for name, rank in _LAUNCH.items()},
            **{n: _input(graph, f"{STATE_GROUP}.{n}", rank) for n, rank in STATE_INPUTS.items()},
            "tail_pool": tail_pool,
            "state_pool": state_pool,
            FACTOR_POOL: pool,
        },
        [
            (ROWS, values),
            *(value.shape for value in (tail_pool, state_pool, pool) if value.shape is not None),
        ],
        key_heads=node.attributes["key_heads"].as_int(),
        eps=norm.eps,
    )
    take_place(node.outputs[1], tail, graph)
    take_place(node.outputs[2], state, graph)
    take_place(gated.outputs[0], output, graph)
    # LazyGatedDelta keeps the inputs of states in its pools, so the graph need not return them.
    state_rows = layout_origin(rows)
    for value in [v for v in graph.outputs if v is rows or v is state_rows]:
        graph.outputs.remove(value)
    return True


def _gated(norm: ir.Node) -> ir.Node:
    """Return the Mul of a norm's output and its gate, through casts."""
    value = norm.outputs[0]
    while True:
        (user,) = {node for node in value.consumers()}
        if user.op_type == "Mul":
            return user
        if user.op_type != "Cast":
            raise AssertionError(
                f"{norm.outputs[0].name}: got {user.op_type} after the norm, expected its gate"
            )
        value = user.outputs[0]


def _joined(inputs: torch.Tensor, gate: torch.Tensor, *, channels: int) -> torch.Tensor:
    """Join the rows of the convolution, the output gate, β and the decay, padded to full tiles."""
    num_padding = -(len(inputs) + len(gate)) % TILE_ROWS
    padding = inputs.new_zeros(num_padding, inputs.shape[1])
    return pack_rows(torch.cat([inputs[:channels], gate, inputs[channels:], padding]))


def _input(graph: ir.Graph, name: str, rank: int) -> ir.Value:
    """Return the integer graph input of this name, and add it if it does not exist."""
    existing = next((value for value in graph.inputs if value.name == name), None)
    if existing is not None:
        return existing
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32))
    value.shape = ir.Shape(["B", "D1"][:rank])
    graph.inputs.append(value)
    return value


def _factor_pool(graph: ir.Graph, tail_pool: ir.Value) -> ir.Value:
    """Add the graph input of a layer's factors, whose size each program defines."""
    assert tail_pool.name is not None
    value = ir.Value(
        name=f"{tail_pool.name.removesuffix('tail_pool')}{FACTOR_POOL}",
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    value.shape = ir.Shape(["slots", "nodes", "F"])
    graph.inputs.append(value)
    return value
