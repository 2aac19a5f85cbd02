"""RankMoe on several ranks: experts that the shard pass splits, against the full experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulation import emulate, has_compiler, tensor_info
from rank_emulation import DONE, RankEmulator, placed

from specbuild.builder.backends.cuda.shard.split import (
    expert_down,
    expert_gate_up,
    expert_gate_up_bias,
    only_first,
)
from specbuild.builder.backends.cuda.tuning.kernel_case import kernel_case
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, Target
from specbuild.plugins_cuda.rank_moe.cases import RankLayer
from specbuild.plugins_cuda.rank_moe.op import OP, contribution
from specbuild.plugins_cuda.rank_sum.rounds import ROUND_ROWS
from specbuild.plugins_cuda.rms_moe.cases import QWEN3_BF16, Layer
from specbuild.plugins_cuda.rms_moe.op import OP as RMS_MOE

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
# The inner width is three blocks: the last of two ranks, and the last two of four, have fewer.
LAYER = Layer(rows=5, live=4, hidden=64, inner=96, experts=6, top_k=2)
BF16 = replace(QWEN3_BF16, rows=5, live=4, hidden=64, inner=96, experts=6, top_k=2, shared=1)
# Two and four warps share K of a tile.
TWO_SLICES = replace(LAYER, hidden=544, inner=64)
FOUR_SLICES = replace(BF16, hidden=512)


def as_torch(layer: Layer) -> dict[str, torch.Tensor | None]:
    """Return the inputs of RmsMoe by name, floats in bf16."""
    arrays = layer.arrays(np.random.default_rng(3))
    tensors: dict[str, torch.Tensor | None] = {}
    for spec, array in zip(RMS_MOE.inputs, arrays, strict=True):
        value = None if array is None else torch.from_numpy(np.ascontiguousarray(array))
        if value is not None and value.dtype == torch.float32 and spec.dtype != "float32":
            value = value.bfloat16()
        tensors[spec.name] = value
    return tensors


def of_ranks(layer: Layer, ranks: int) -> list[dict[str, torch.Tensor | None]]:
    """Return each rank's inputs, with its part of the experts."""
    full = as_torch(layer)
    parts = {
        "gate_up": expert_gate_up(full["gate_up"], ranks),
        "gate_up_bias": expert_gate_up_bias(full["gate_up_bias"], ranks),
        "down": expert_down(full["down"], layer.inner, ranks),
        "down_bias": only_first(full["down_bias"], ranks),
    }
    return [
        full | {n: part[rank].contiguous() for n, part in parts.items()} for rank in range(ranks)
    ]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


@pytest.mark.parametrize("layer", [LAYER, BF16], ids=["mxfp4", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_parts_of_the_ranks_add_up_to_the_full_result(layer: Layer, ranks: int) -> None:
    full = as_torch(layer)
    expected = RMS_MOE.reference(*full.values(), **layer.attributes())
    attributes = {**layer.attributes(), "ranks": ranks, "exchange": 0}
    unused = [torch.zeros(0)] * 3
    shares = [[*of_rank.values(), *unused] for of_rank in of_ranks(layer, ranks)]
    sent = [contribution(*share, **attributes) for share in shares]
    for share in shares:
        y = OP.reference(*share, contributions=sent, **attributes)
        # Sums of other parts differ by rounding only.
        torch.testing.assert_close(y[:4], expected[:4], atol=0.04, rtol=0.01)
    # No part equals the full result, so a rank without a contribution would be detected.
    total = torch.stack(sent)[:, :4]
    used = min(ranks, -(-layer.inner // 32))
    assert (total.abs().amax(dim=(1, 2)) > 0.1).sum() == used


@pytest.mark.parametrize(
    ("hidden", "bf16", "ranks", "slices"),
    [(2880, False, 2, 2), (2880, False, 4, 2), (2048, True, 4, 4), (2048, True, 8, 4),
     (2048, False, 8, 2), (480, False, 2, 1)],
)  # fmt: skip
def test_slices_of_k_depend_on_ranks_and_width_only(
    hidden: int, bf16: bool, ranks: int, slices: int
) -> None:
    """The slices are equal for any number of rows: otherwise bits would depend on it."""
    for rows in (1, 256):
        layer = Layer(rows=rows, hidden=hidden, inner=32, experts=8, top_k=2, bf16=bf16)
        lowering = kernel_case(OP, RankLayer(layer, ranks).case("")).lowering("decode", Target())
        (gate_up,) = (x for x in lowering.launches if x.kernel.entry == "gate_up_experts")
        assert dict(gate_up.kernel.constants)["SLICES"] == slices


@emulated
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("layer", "ranks"), [(LAYER, 2), (BF16, 2), (LAYER, 4), (TWO_SLICES, 2), (FOUR_SLICES, 4)]
)
def test_every_rank_has_equal_results(layer: Layer, ranks: int, phase: Phase) -> None:
    """Emulate the full op: the experts rank by rank, then the exchange of all ranks at once."""
    attributes: dict[str, Any] = {**layer.attributes(), "ranks": ranks, "exchange": 0}
    shares, launches, memories = of_ranks(layer, ranks), [], []
    for share in shares:
        arrays = {name: as_array(t) for name, t in share.items() if t is not None}
        arrays |= {
            "inbox": np.zeros((2, ranks - 1, ROUND_ROWS * layer.hidden, 2), np.int32),
            "state": np.array([6, 0], np.int32),
            "fault": np.zeros(8, np.int32),
            "y": np.zeros((layer.rows, layer.hidden), np.uint16),
        }
        tensors = {name: tensor_info(array) for name, array in arrays.items()}
        lowering = OP.lowered(LoweringRequest(tensors, attributes, phase=phase))
        for workspace in lowering.workspaces:
            arrays[workspace.name] = np.zeros(workspace.nbytes, np.uint8)
        *experts, exchange = lowering.launches
        memories.append(placed(arrays))
        for launch in experts:
            emulate(launch, memories[-1])
        launches.append([exchange])
    assert RankEmulator(ranks).run(launches, memories, 7) == DONE
    results = [memory["y"].data.view(np.uint16).reshape(layer.rows, -1) for memory in memories]
    for each in results[1:]:
        np.testing.assert_array_equal(each, results[0])
    full = as_torch(layer)
    expected = RMS_MOE.reference(*full.values(), **layer.attributes()).float()
    result = torch.from_numpy(results[0].view(np.int16)).view(torch.bfloat16).float()
    torch.testing.assert_close(result[:4], expected[:4], atol=0.06 * ranks, rtol=0.02)
