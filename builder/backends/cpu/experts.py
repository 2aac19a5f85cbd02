"""The experts on a CPU: all of them as two Gemms, or only the chosen ones by a contrib op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
import torch

from specbuild.builder.passes.rewriting import replace
from specbuild.builder.passes.weights import derive
from specbuild.plugins_cuda.body import BodyBuilder, static_size
from specbuild.plugins_cuda.moe.contrib import contrib_body, contrib_weights, cpu_form
from specbuild.plugins_cuda.moe.dense import dense_body, dense_weights
from specbuild.plugins_cuda.moe.op import OP

_WEIGHTS = slice(2, 8)


def lower_experts(graph: ir.Graph, node: ir.Node) -> None:
    """Puts the faster form in the node's place, its weights derived from the checkpoint's."""
    attributes = OP.complete({name: a.value for name, a in node.attributes.items()})
    x, logits = node.inputs[:2]
    assert x is not None and logits is not None
    weights = list(node.inputs[_WEIGHTS])
    gate_up = weights[0]
    assert gate_up is not None and gate_up.name is not None
    experts = static_size(gate_up, 0)
    # MXFP4 blocks are [E, 2I, H/32, 16], plain weights [E, H, 2I].
    inner = static_size(gate_up, 2 if weights[1] is None else 1) // 2
    prefix = gate_up.name.rsplit(".", 1)[0]
    if cpu_form(experts, inner, attributes["gating"]) == "dense":
        make: Callable[..., dict[str, torch.Tensor]] = partial(
            dense_weights, alpha=attributes["alpha"]
        )
        form: Callable[..., ir.Value] = dense_body
        names = {key: f"{prefix}.dense.{key}" for key in ("w1", "b1", "w2", "b2")}
        names["spread"] = f"expert_spread.{experts}x{inner}"
    else:
        make, form = contrib_weights, contrib_body
        names = {key: f"{prefix}.{key}" for key in ("w1", "b1", "w2", "b2")}

    def part(key: str, *tensors: torch.Tensor | None) -> torch.Tensor:
        return make(*tensors)[key]

    derived = {key: derive(graph, name, weights, partial(part, key)) for key, name in names.items()}
    b = BodyBuilder()
    replace(node, b, [form(b, x, logits, derived, attributes, experts=experts)], graph)
