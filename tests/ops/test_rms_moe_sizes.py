"""Sizes of RmsMoe: tactics that fit, rejected sizes, and the bytes that a call reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deepseek_requests import routed_request
from gpt_oss_requests import experts_request

from specbuild.plugins_cuda.launches import RESERVED_BYTES, TensorInfo
from specbuild.plugins_cuda.rms_moe.cases import (
    DEEPSEEK_V3,
    GEMMA4,
    GLM_FLASH,
    KIMI_K2,
    QWEN3_NEXT,
    QWEN35_MOE,
    V2_LITE,
)
from specbuild.plugins_cuda.rms_moe.memory import (
    Sizes,
    down_tactic,
    gate_up_tactic,
    lay_out_down,
    lay_out_gate_up,
)
from specbuild.plugins_cuda.rms_moe.op import OP
from specbuild.plugins_cuda.traffic import NoTraffic, TrafficRequest
from specbuild.runtime.errors import SpecbuildError

FAMILIES = {
    "V2-Lite": V2_LITE, "V3": DEEPSEEK_V3, "K2": KIMI_K2, "GLM-4.7": GLM_FLASH,
    "Qwen3-Next": QWEN3_NEXT, "Qwen3.5": QWEN35_MOE, "Gemma 4": GEMMA4,
}  # fmt: skip


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_bucket_of_gpt_oss_has_tactics_that_fit(rows: int, experts: int) -> None:
    request = experts_request(rows, experts)
    assert OP.tactics is not None
    assert OP.lower is not None
    candidates = OP.tactics(request)
    assert len(candidates) > 2
    sizes = Sizes(rows, 2, 2880, 2880, experts, 4)
    for tactic in candidates:
        launches = OP.lower(replace(request, tactic=tactic)).launches
        layouts = (
            lay_out_gate_up(sizes, gate_up_tactic(tactic), request.target),
            lay_out_down(sizes, down_tactic(tactic), request.target),
        )
        multiprocessor = request.target.shared_bytes_per_block + RESERVED_BYTES
        for launch, layout in zip(launches[1:3], layouts, strict=True):
            assert layout is not None
            assert launch.shared_bytes == layout.dynamic
            used_bytes = layout.dynamic + layout.static + RESERVED_BYTES
            assert used_bytes <= multiprocessor < 2 * used_bytes


@pytest.mark.parametrize("bf16", [False, True], ids=["mxfp4", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_bucket_of_other_families_has_tactics_that_fit(
    name: str, rows: int, bf16: bool
) -> None:
    """Rows of 7168 values leave shared memory for few stages only."""
    request = routed_request(replace(FAMILIES[name], rows=rows, bf16=bf16))
    assert OP.tactics is not None
    assert OP.lower is not None
    assert OP.tactics(request)
    _, *experts, _ = OP.lower(request).launches
    assert all(launch.shared_bytes <= request.target.shared_bytes_per_block for launch in experts)


@pytest.mark.parametrize(
    ("rows", "experts", "longest"), [(128, 32, 24), (64, 32, 16), (256, 128, 16)]
)
def test_experts_of_many_rows_have_long_passes(rows: int, experts: int, longest: int) -> None:
    assert OP.tactics is not None
    assert OP.tactics(experts_request(rows, experts))[0]["pass_rows"] == longest


def test_shared_experts_are_read_by_every_pass() -> None:
    request = routed_request(replace(GLM_FLASH, rows=4, bf16=False))
    stored = set(request.tensors) - {"x", "y", "row_start"}
    assert OP.traffic is not None and not isinstance(OP.traffic, NoTraffic)
    traffic = OP.traffic(TrafficRequest(request.tensors, request.attributes, stored))
    packed = ("gate_up", "gate_up_bias", "down", "down_bias")
    an_expert = sum(request.tensors[name].nbytes for name in packed) // 65
    small = sum(request.tensors[name].nbytes for name in stored - set(packed))
    assert small == 2 * (2048 + 64 * 2048 + 64) + 4 * 64
    assert [(term.amount, term.per) for term in traffic.read] == [
        (small, "pass"), (an_expert, "pass"), (an_expert, "chosen_expert"),
    ]  # fmt: skip
    of_a_row = {term.part: 0 for term in traffic.operations}
    for term in traffic.operations:
        of_a_row[term.part] += term.amount
    assert of_a_row == {"dense": 2 * 2048 * (64 + 3 * 1536), "experts": 4 * 2 * 3 * 2048 * 1536}
    assert (traffic.experts, traffic.experts_per_token) == (64, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 257}, "257 rows, expected at most 256"),
        ({"hidden": 7232}, "hidden 7232, the router's registers hold 7200"),
        (
            {"tactic": {"warps": 3, "stages": 2, "pass_rows": 8}},
            "got tactic",
        ),
        ({"gating": "sigmoids"}, "gating 'sigmoids', its CUDA kernels know softmax_selected, "),
        ({"top_k": 11}, "top 11 of 32 experts, its CUDA kernels know 1 to 10 of up to 512"),
        ({"shared": 3}, "3 shared experts, its CUDA kernels know up to 2"),
        ({"group_score": "mean"}, "group_score 'mean', its CUDA kernels know sum_of_two, max"),
        ({"groups": 5}, "1 of 5 groups of 32 experts, .* groups of equal size, of 2 experts"),
        ({"groups": 16}, "top 4 of 1 groups of 2 experts, which are fewer"),
        ({"x": TensorInfo((1, 2880), "float32")}, "x is float32"),
        ({"down": TensorInfo((32, 2880, 90, 16), "uint8")}, "weights packed by"),
    ],
)
def test_rejects_unsupported_layers(change: dict[str, Any], message: str) -> None:
    request = experts_request(change.get("rows", 1), hidden=change.get("hidden", 2880))
    ((name, value),) = change.items()
    if name in request.tensors:
        request = replace(request, tensors={**request.tensors, name: value})
    elif name in request.attributes:
        request = replace(request, attributes={**request.attributes, name: value})
    elif name == "tactic":
        request = replace(request, tactic=value)
    assert OP.lower is not None
    with pytest.raises(SpecbuildError, match=message):
        OP.lower(request)
