"""The router logits that a kernel writes identify the experts that its rows select."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation import Guarded, emulate, guarded, has_compiler

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.moe.op import route
from specbuild.plugins_cuda.rms_moe.cases import DEEPSEEK_V3, Layer
from specbuild.plugins_cuda.rms_moe.op import OP, router_input
from specbuild.runtime.measure.routed_experts import chosen_experts

NAMES = [spec.name for spec in OP.inputs]
LAYERS = {
    "logits": Layer(rows=6, hidden=96, inner=64, experts=16, top_k=4),
    "scores in groups": replace(
        DEEPSEEK_V3, rows=6, hidden=96, inner=64, experts=16, top_k=4, groups=4, groups_chosen=2
    ),
}


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@pytest.mark.parametrize("name", LAYERS)
def test_logits_identify_the_selected_experts(name: str) -> None:
    layer = LAYERS[name]
    attributes = OP.complete(layer.attributes())
    arrays = dict(zip(NAMES, layer.arrays(np.random.default_rng(4)), strict=True))
    tensors = {}
    for spec in OP.inputs:
        if arrays[spec.name] is not None:
            tensor = torch.from_numpy(np.ascontiguousarray(arrays[spec.name]))
            narrow = tensor.is_floating_point() and spec.dtype != "float32"
            tensors[spec.name] = tensor.bfloat16() if narrow else tensor
    kinds = {
        torch.bfloat16: "bfloat16", torch.int32: "int32", torch.uint8: "uint8",
        torch.float32: "float32",
    }  # fmt: skip
    infos = {n: TensorInfo(tuple(t.shape), kinds[t.dtype]) for n, t in tensors.items()}
    infos["y"] = infos["x"]
    lowering = OP.lower(LoweringRequest(infos, attributes, "decode", SMALL_TARGET))
    assert OP.routing is not None
    left = OP.routing.logits
    launch = next(each for each in lowering.launches if left in each.arguments)
    memory = {name: guarded(bits(tensor)) for name, tensor in tensors.items()}
    for workspace in lowering.workspaces:
        memory[workspace.name] = Guarded(workspace.nbytes)
        memory[workspace.name].data[:] = 0 if workspace.zeroed else 0xFF
    emulate(launch, memory)
    live = int(arrays[OP.routing.row_start][-1])
    logits = memory[left].data.view(np.float32).reshape(-1, 16)[:live]
    _, expected = router_input(
        tensors["x"],
        tensors["norm"],
        (tensors["router_weight"], tensors["router_bias"]),
        *(attributes[n] for n in ("eps", "rounding", "logits")),
    )
    weights = route(
        expected[:live], 4, layer.gating, tensors.get("choice_bias"), groups=layer.groups,
        groups_chosen=layer.groups_chosen,
    )  # fmt: skip
    selected = chosen_experts(logits, 4, OP.routing.groups(attributes))
    for row, chosen in zip(weights, selected, strict=True):
        assert set(chosen.tolist()) == set(torch.nonzero(row)[:, 0].tolist())


def test_a_tie_selects_the_lower_expert() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 0.5, 2.0], [-0.0, 0.0, -1.0, 0.0, -3.0]], np.float32)
    assert chosen_experts(logits, 2).tolist() == [[1, 2], [0, 1]]
