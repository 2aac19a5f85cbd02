"""What the router's kernel leaves behind names the experts that its rows choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Guarded, emulate, guarded, has_compiler

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.moe.op import route
from specbuild.plugins_cuda.rms_moe.cases import Layer
from specbuild.plugins_cuda.rms_moe.op import OP, router_input
from specbuild.runtime.measure.routed_experts import chosen_experts

NAMES = [spec.name for spec in OP.inputs]
ATTRIBUTES = {"eps": 1e-5, "top_k": 4, "alpha": 1.702, "limit": 7.0, "gating": "softmax_selected"}


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_the_experts_of_every_row_are_read_from_its_logits() -> None:
    layer = Layer(rows=6, hidden=96, inner=64, experts=16, top_k=4)
    arrays = dict(zip(NAMES, layer.arrays(np.random.default_rng(4)), strict=True))
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        tensors[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    kinds = {torch.bfloat16: "bfloat16", torch.int32: "int32", torch.uint8: "uint8"}
    infos = {n: TensorInfo(tuple(t.shape), kinds[t.dtype]) for n, t in tensors.items()}
    infos["y"] = infos["x"]
    lowering = OP.lower(LoweringRequest(infos, OP.complete(ATTRIBUTES), "decode", SMALL_TARGET))
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
    _, wanted = router_input(
        *(tensors[n] for n in ("x", "norm", "router_weight", "router_bias")), 1e-5
    )
    weights = route(wanted[:live], 4, "softmax_selected")
    for row, chosen in zip(weights, chosen_experts(logits, 4), strict=True):
        assert set(chosen.tolist()) == set(torch.nonzero(row)[:, 0].tolist())


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 0.5, 2.0], [-0.0, 0.0, -1.0, 0.0, -3.0]], np.float32)
    assert chosen_experts(logits, 2).tolist() == [[1, 2], [0, 1]]
