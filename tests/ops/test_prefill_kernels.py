"""The prefill GEMMs: the layout of their panels, the sort by expert, and batch invariance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation import Guarded, emulate, guarded, has_compiler, run_lowering
from kernel_parameters import tensor_parameters
from left_out import slow

import specbuild.plugins_cuda as package
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    KernelCase,
    bits,
    kernel_case,
)
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.cases import linear
from specbuild.plugins_cuda.linear.storage import MXFP4
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.prefill_gemm import (
    MAX_COLUMNS,
    Gemm,
    predicted_columns,
    ring_bytes,
    stages_for,
)
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_low_rank.cases import project as low_rank
from specbuild.plugins_cuda.rms_moe.cases import DEEPSEEK_V3, Layer
from specbuild.plugins_cuda.rms_moe.expert_codes import expert_weight
from specbuild.plugins_cuda.rms_moe.packing import down_steps
from specbuild.plugins_cuda.rms_moe.prefill import lower_prefill as lower_moe
from specbuild.plugins_cuda.rms_qkv_rope.cases import project
from specbuild.plugins_cuda.rms_swiglu.cases import swiglu
from specbuild.runtime.errors import SpecbuildError

emulated = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
PREFILL_OPS = ("Linear", "RmsLowRank", "RmsQkvRope", "RmsSwiglu", "RmsMoe")


def outputs(drawn: KernelCase, tactic: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the bits that the prefill kernels write."""
    lowering = drawn.lowering("prefill", SMALL_TARGET, tactic)
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    wanted = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    return run_lowering(drawn.op, lowering, inputs, wanted)


def some_rows(drawn: KernelCase, rows: slice) -> KernelCase:
    """Return the case with these rows only."""

    def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        per_row = {"x", "residual", "positions", "write_slot", "y", "h", "q"}
        return {n: t[rows] if n in per_row else t for n, t in tensors.items()}

    inputs = cut(drawn.inputs)
    if "row_start" in inputs:
        inputs["row_start"] = torch.tensor([0, inputs["x"].shape[0]], dtype=torch.int32)
    return replace(drawn, inputs=inputs, outputs=cut(drawn.outputs))


CHUNKS: list[Any] = [
    ("Linear", linear(75, 144, 96, bias=True, residual=True), "y"),
    ("RmsQkvRope", project(75, 96), "q"),
    ("RmsLowRank", low_rank(75, 96), "q"),
    ("RmsSwiglu", swiglu(75, 96, 72), "h"),
    ("RmsMoe", Layer(rows=75, hidden=96, inner=96, experts=6, top_k=3).case("chunk"), "y"),
    (
        "RmsMoe",
        replace(DEEPSEEK_V3, rows=75, hidden=96, inner=96, experts=16, top_k=3).case("DeepSeek"),
        "y",
    ),
]


@emulated
@pytest.mark.parametrize(
    ("name", "case", "output"), CHUNKS, ids=[f"{c[0]} {c[1].name}" for c in CHUNKS]
)
@pytest.mark.parametrize("wgmma", [0, 1])
def test_a_row_does_not_depend_on_other_rows_or_tiles(
    name: str, case: Any, output: str, wgmma: int
) -> None:
    drawn = kernel_case(op_named(name), case)
    whole = outputs(drawn, {"wgmma": wgmma})[output]
    narrow = outputs(drawn, {"columns": 32, "wgmma": wgmma})[output]
    np.testing.assert_array_equal(narrow, whole)
    for rows in (slice(0, 1), slice(37, 62)):
        alone = outputs(some_rows(drawn, rows), {"wgmma": wgmma})[output]
        np.testing.assert_array_equal(alone, whole[rows])
    assert np.unique(whole).size > whole.size // 100


@emulated
@pytest.mark.parametrize(
    "tactic",
    [
        *slow({"columns": 32, "few": 16}),
        {"columns": 64, "few": 12},
    ],
)
@pytest.mark.parametrize(
    "layer",
    [
        Layer(rows=75, hidden=96, inner=96, experts=6, top_k=3),
        *slow(Layer(rows=40, live=37, hidden=1056, inner=1056, experts=3, top_k=2, popular=True)),
    ],
    ids=["one stage", "several stages"],
)
def test_experts_with_few_rows_have_the_bits_of_many_rows(
    layer: Layer, tactic: dict[str, int]
) -> None:
    """Weights pass through shared memory: several stages, tiles that end within a panel."""
    drawn = kernel_case(op_named("RmsMoe"), layer.case("chunk"))
    many, few = outputs(drawn, {"columns": 64}), outputs(drawn, tactic)
    drawn.check(few)
    np.testing.assert_array_equal(few["y"], many["y"])


@emulated
@pytest.mark.parametrize("columns", [64, 96])
def test_panels_have_the_documented_layout(columns: int) -> None:
    """Compare each value's place with the layout that prefill_panel.cuh documents."""
    drawn = kernel_case(op_named("Linear"), linear(11, 16, columns))
    x = bits(drawn.inputs["x"])
    launch = drawn.lowering("prefill", SMALL_TARGET).launches[0]
    rows, panels = 16, -(-columns // 64)
    memory = {"x": guarded(x), "workspace_panels": Guarded(panels * rows * 128)}
    emulate(launch, memory)
    written = memory["workspace_panels"].data.view(np.uint16).reshape(panels, rows, 8, 8)
    for row in range(11):
        for k in range(panels * 64):
            group, pair = k % 32 // 8, k % 8 // 2
            chunk = k % 64 // 32 * 4 + pair
            value = written[k // 64, row, chunk ^ row % 8, 2 * group + k % 2]
            assert value == (x[row, k] if k < columns else 0), (row, k)
    assert (written[:, 11:] == 0xFFFF).all()


def sort_launch(rows: int, experts: int, top_k: int, columns: int) -> tuple[Lowering, int]:
    layer = Layer(rows=rows, hidden=32, inner=32, experts=experts, top_k=top_k)
    tensors = {
        "x": TensorInfo((rows, 32), "bfloat16"),
        "gate_up": TensorInfo((experts, 4, 512), "uint8"),
        "down": expert_weight(MXFP4, experts, 4, down_steps(32)),
        "gate_up_bias": TensorInfo((experts, 64), "bfloat16"),
        "row_start": TensorInfo((2,), "int32"),
    }
    attributes = layer.attributes()
    lowering = lower_moe(
        LoweringRequest(tensors, attributes, "prefill", tactic={"columns": columns})
    )
    panels = next(w for w in lowering.workspaces if w.name == "workspace_rows")
    return lowering, panels.nbytes // 128


@emulated
@pytest.mark.parametrize(
    ("rows", "live", "experts", "top_k", "columns", "skew"),
    [
        (1, 1, 1, 1, 16, 0.0),
        (300, 0, 4, 2, 16, 0.0),
        (300, 277, 8, 3, 32, 0.0),
        (700, 700, 32, 4, 256, 0.0),
        (600, 600, 40, 4, 64, 2.0),
        (513, 511, 128, 4, 48, 1.0),
        (300, 290, 384, 8, 64, 0.1),
    ],
)
def test_the_sort_by_expert_places_every_row_once(
    rows: int, live: int, experts: int, top_k: int, columns: int, skew: float
) -> None:
    rng = np.random.default_rng(rows + experts)
    lowering, panel_rows = sort_launch(rows, experts, top_k, columns)
    noise = rng.gumbel(size=(rows, experts)) - skew * np.arange(experts)
    chosen = np.sort(np.argsort(-noise, axis=1)[:, :top_k], axis=1).astype(np.int32)
    chosen[live:] = 10**6
    sizes = {w.name: w.nbytes for w in lowering.workspaces}
    memory = {
        "row_start": guarded(np.array([0, live], np.int32)),
        "workspace_chosen": guarded(chosen),
        "workspace_position": Guarded(sizes["workspace_position"]),
        "workspace_tiles": Guarded(sizes["workspace_tiles"]),
    }
    emulate(lowering.launches[1], memory)
    assert all(place.untouched() for place in memory.values())
    position = memory["workspace_position"].data.view(np.int32).reshape(rows, top_k)[:live]
    tiles = memory["workspace_tiles"].data.view(np.int32)
    count, *counters = tiles[:3]
    assert counters == [0, 0]
    table = tiles[4:].reshape(-1, 4)[:count, :3]

    owner = np.full(panel_rows, -1)
    for expert, first, size in table:
        assert first % 8 == 0
        assert 0 < size <= columns
        assert first + -(-size // 16) * 16 <= panel_rows
        assert (owner[first : first + size] == -1).all()
        owner[first : first + size] = expert
    np.testing.assert_array_equal(owner[position], chosen[:live])
    assert np.unique(position).size == position.size == (owner >= 0).sum()
    for expert in range(experts):
        here = position[chosen[:live] == expert]
        assert (np.diff(here) == 1).all()
        widths = table[table[:, 0] == expert][:, 2]
        assert len(widths) == -(-here.size // columns)
    # An expert's tiles are adjacent and in order; experts with the widest tiles come first.
    owners = table[:, 0]
    same = owners[1:] == owners[:-1]
    assert same.sum() == len(owners) - len(np.unique(owners))
    assert (np.diff(table[:, 1])[same] > 0).all()
    widest = -(-table[np.r_[True, ~same][:count], 2] // 8)
    assert (np.diff(widest) <= 0).all()


@pytest.mark.parametrize("name", PREFILL_OPS)
def test_parameters_follow_the_declaration(name: str) -> None:
    op = op_named(name)
    folder = Path(package.__path__[0]) / op.reference.__module__.split(".")[-2]
    order = {t.name: i for i, t in enumerate((*op.inputs, *op.outputs))}
    entries: dict[str, tuple[str, ...]] = {}
    for file in sorted(folder.glob("prefill*.cu")):
        entries |= tensor_parameters(file.read_text())
    seen = set()
    for entry, names in entries.items():
        tensors = [n for n in names if not n.startswith("workspace")]
        assert set(tensors) <= set(order), entry
        assert [order[n] for n in tensors] == sorted(order[n] for n in tensors), entry
        seen |= set(tensors)
    assert seen == set(order) - {output for output, _ in op.aliases}


@pytest.mark.parametrize("columns", range(16, MAX_COLUMNS + 1, 16))
def test_rings_fill_the_shared_memory(columns: int) -> None:
    for staging in (40, 72):
        stages = stages_for(columns, staging)
        assert stages >= 4
        assert ring_bytes(columns, staging, stages) <= 227 * 1024 - 2048


@pytest.mark.parametrize("rows", [1, 16, 64, 255, 1024, 2048])
def test_the_selected_tile_wastes_few_columns(rows: int) -> None:
    for row_tiles in (1, 180, 320, 2160):
        columns = predicted_columns(rows, row_tiles, 132)
        gemm = Gemm(rows, 90, row_tiles, columns, staging=72)
        assert columns % 16 == 0
        assert gemm.panel_rows - rows < max(16, columns)
        assert gemm.panel_rows <= max(16, 1.25 * rows)


def linear_request(**changes: Any) -> LoweringRequest:
    tensors = {
        "x": TensorInfo((64, 96), "bfloat16"),
        "weight": TensorInfo((4, 3, 512), "bfloat16"),
    }
    attributes = op_named("Linear").complete({})
    return replace(LoweringRequest(tensors, attributes, "prefill"), **changes)


def lower(op: OpSpec, request: LoweringRequest) -> Lowering:
    assert op.lower is not None
    return op.lower(request)


@pytest.mark.parametrize("columns", [8, 24, 272, -16])
def test_rejects_an_unsupported_tile(columns: int) -> None:
    with pytest.raises(SpecbuildError, match=rf"{columns} tokens, expected a multiple of 16"):
        lower(op_named("Linear"), linear_request(tactic={"columns": columns}))


@pytest.mark.parametrize(
    ("tactic", "message"),
    [
        ({"columns": 64, "few": 8}, r"8 warps .*, expected one of \(12, 16\)"),
        ({"columns": 112, "few": 12}, "112 tokens, expected a multiple of 16 up to 96"),
    ],
)
def test_rejects_an_unsupported_form_for_few_rows(tactic: dict[str, int], message: str) -> None:
    drawn = kernel_case(op_named("RmsMoe"), Layer(rows=128, hidden=96, inner=96).case("chunk"))
    with pytest.raises(SpecbuildError, match=message):
        drawn.lowering("prefill", SMALL_TARGET, tactic)


def test_rejects_a_weight_of_another_width() -> None:
    tensors = {**linear_request().tensors, "x": TensorInfo((64, 128), "bfloat16")}
    with pytest.raises(
        SpecbuildError, match=r"3 units of 32 columns, expected those of rows of 128 values"
    ):
        lower(op_named("Linear"), linear_request(tensors=tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": "sigmoids"}, "gating 'sigmoids', its CUDA kernels know softmax_selected, "),
        ({"top_k": 11}, "top 11 of 16 experts, its CUDA kernels know 1 to 10 of up to 512"),
    ],
)
def test_rejects_an_unsupported_router(changes: dict[str, Any], message: str) -> None:
    tensors = {
        "x": TensorInfo((64, 96), "bfloat16"),
        "gate_up": TensorInfo((16, 4, 1024), "uint8"),
        "down": expert_weight(MXFP4, 16, 12, down_steps(32)),
        "gate_up_bias": TensorInfo((16, 64), "bfloat16"),
        "row_start": TensorInfo((3,), "int32"),
    }
    attributes = {**Layer().attributes(), **changes}
    with pytest.raises(SpecbuildError, match=message):
        lower_moe(LoweringRequest(tensors, attributes, "prefill"))
