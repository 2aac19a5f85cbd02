"""``build --backend cuda``: a complete engine directory, on a machine without a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_two_layers
from report_page import ReportPage
from safetensors import safe_open
from shared_graphs import exported_anew

from specbuild.builder.build import build
from specbuild.builder.engine.rewrite import rewrite_engine
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.cli.main import main
from specbuild.cli.report.engine_sections import costs_figures
from specbuild.cli.tables.step_cost_table import StepCostFacts, StepCostRow
from specbuild.runtime.cache.layout import layouts
from specbuild.runtime.draft.device_costs import (
    METHOD,
    STEP_COSTS_FILE,
    ShapeCosts,
    StepCosts,
    programs_digest,
    to_bytes,
)
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.engine_dir.plan import POINTER, Plan, Program
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.engine_dir.tensor_table import without_table
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.check import read_plan
from specbuild.runtime.executors.cuda.cubin import kernel_parameters
from specbuild.runtime.executors.cuda.plan_check import check_draft_offsets

PREFILL = Path(__file__).parents[3] / "benchmarks/results/h200-2026-11-23/20b-prefill.json"
LAUNCH_LIMIT_BYTES = 227 * 1024


class Stages(SilentProgress):
    """Progress that records the stages of a build."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def start(self, stage: str, total: int, unit: str) -> None:
        del total, unit
        self.names.append(stage)


def options(folder: Path, output: Path, **changes: Any) -> BuildOptions:
    """Return the options of a small engine with a draft and few programs."""
    small = {
        "backend": "cuda", "gpu": "sm_90a", "max_seq_len": 64, "max_batch_size": 1,
        "draft_top_k": 1, "draft_depth": 1, "draft_tokens": 1,
    }  # fmt: skip
    return BuildOptions.from_flat(
        model=folder / "target",
        draft=folder / "draft",
        output=output,
        **(small | changes),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target and draft of the example's widths, two layers deep."""
    path = tmp_path_factory.mktemp("checkpoints")
    write_two_layers(path)
    return path


@pytest.fixture(scope="module")
def stages() -> Stages:
    return Stages()


@pytest.fixture(scope="module")
def engine(checkpoints: Path, stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engine") / "cuda"
    with exported_anew():
        build(options(checkpoints, output), stages)
    return output


@pytest.fixture(scope="module")
def plan(engine: Path) -> Plan:
    return from_json(Plan, json.loads((engine / "plan.json").read_text()), "plan.json")


def program(engine: Path, file: str) -> Program:
    data = without_table(json.loads((engine / file).read_text()))
    return from_json(Program, data, file)


def test_the_directory_is_complete_and_describes_itself(engine: Path, stages: Stages) -> None:
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    assert (manifest.backend, manifest.device, manifest.roles) == ("cuda", "sm_90a", {})
    read_plan(engine, manifest)
    check_draft_offsets("d2t", open_weights(engine, manifest)["d2t"], manifest)
    assert "compiling kernels" in stages.names
    assert stages.names.index("compiling kernels") < stages.names.index("writing weights")


def test_the_limits_determine_the_programs(plan: Plan) -> None:
    names = [entry.name for entry in plan.programs]
    assert names == [
        "prefill@64", "score@8", "score@64",
        "step@1", "step@1.logits", "step@1.extends", "step@1.extends.logits",
        "step@1.draft-1-1-1", "step@1.draft-1-1-1.logits",
        "step@1.offered-1.logits",
        "step@1.adjusted", "step@1.adjusted.extends", "adjust",
    ]  # fmt: skip
    assert (plan.gpu, plan.multiprocessors) == ("sm_90a", 132)
    assert plan.driver_version >= 12000


def test_every_launch_has_a_kernel_and_matching_arguments(engine: Path, plan: Plan) -> None:
    for entry in plan.programs:
        result = program(engine, entry.file)
        assert len(result.launches) == entry.launches > 0
        assert {launch.op for launch in result.launches} == set(range(len(result.ops)))
        for launch in result.launches:
            kernel = plan.kernels[launch.kernel]
            cubin = (engine / kernel.cubin).read_bytes()
            sizes = kernel_parameters(cubin, kernel.cubin)[kernel.entry]
            # A pointer, null or not, has 8 bytes; an int32 or float32 has 4.
            assert sizes == tuple(8 if a[0] in (POINTER, 3) else 4 for a in launch.arguments)
            assert launch.shared_bytes + kernel.shared_bytes <= LAUNCH_LIMIT_BYTES
            assert launch.block * kernel.registers <= 65536


def test_caches_and_weights_have_buffers(engine: Path, plan: Plan) -> None:
    manifest = read_manifest(engine)
    by_space: dict[str, dict[str, int]] = {}
    for buffer in plan.buffers:
        by_space.setdefault(buffer.space, {})[buffer.name] = buffer.bytes
    groups = layouts(manifest.cache_groups).values()
    assert by_space["cache"] == {layout.name: layout.bytes for layout in groups}
    weights = open_weights(engine, manifest)
    assert by_space["weights"] == {name: array.nbytes for name, array in weights.items()}
    assert list(by_space["arena"]) == ["arena"]


def test_weights_are_bf16_and_only_permuted(engine: Path, checkpoints: Path) -> None:
    """A packed projection has the checkpoint's bit patterns, each equally often."""
    manifest = read_manifest(engine)
    name = next(n for n in manifest.tensors if "o_proj" in n and "layers.0" in n)
    stored = manifest.tensors[name]
    assert stored.dtype == "BF16"
    with safe_open(checkpoints / "target" / "model.safetensors", "pt") as file:
        actual = np.sort(open_weights(engine, manifest)[name], axis=None)
        (source,) = [s for s in stored.sources if s.endswith("weight")]
        desired = file.get_tensor(source).view(torch_int16()).numpy().view(np.uint16)
    np.testing.assert_array_equal(actual, np.sort(desired, axis=None))
    assert {t.dtype for t in manifest.tensors.values()} == {"BF16", "F32", "I32", "U8"}


def torch_int16() -> Any:
    import torch

    return torch.int16


def test_the_report_lists_kernels_programs_and_memory(engine: Path, plan: Plan) -> None:
    report = json.loads((engine / "build_report.json").read_text())["cuda"]
    assert len(report["kernels"]) == len(plan.kernels)
    assert all(kernel["registers"] > 0 for kernel in report["kernels"])
    sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
    assert report["memory"]["arena"] == sizes["arena"]
    plain, drafted = (
        next(p for p in report["programs"] if p["name"] == name)
        for name in ("step@1", "step@1.draft-1-1-1")
    )
    head = sizes["lm_head.packed"]
    assert head < plain["weight_bytes"] < drafted["weight_bytes"] < report["memory"]["weights"]
    experts = sum(sizes[n] for n in sizes if ".experts." in n)
    assert plain["expert_bytes"] > 0.9 * experts and plain["experts"] == 8
    # One full and one sliding layer of 2 heads of 32: K and V in bf16.
    assert plain["context_bytes_per_token"] == 2 * 2 * 32 * 2
    assert plain["window_bytes"] == 8 * 2 * 2 * 32 * 2


def test_inspect_shows_programs_and_kernels(
    engine: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(engine), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    drafted = next(p for p in facts["programs"] if p["name"] == "step@1.draft-1-1-1")
    entry = next(e for e in plan.programs if e.name == drafted["name"])
    launches = json.loads((engine / entry.file).read_text())["launches"]
    assert drafted["launches"] == len(launches)
    assert drafted["kernels"] == len({launch["kernel"] for launch in launches})
    sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
    most_bytes = max(p["arena_bytes"] for p in facts["programs"])
    assert -(-most_bytes // 256) * 256 == sizes["arena"]
    assert sum(kernel["variants"] for kernel in facts["kernels"]) == len(plan.kernels)
    most = max(kernel.registers for kernel in plan.kernels)
    assert max(kernel["registers"] for kernel in facts["kernels"]) == most
    weights = sum(b.bytes for b in plan.buffers if b.space == "weights")
    assert facts["predicted_memory"]["weights_bytes"] == weights
    assert main(["inspect", str(engine)]) == 0
    assert "step@1.draft-1-1-1" in capsys.readouterr().out


def test_a_report_page_shows_programs_kernels_and_reasons(
    engine: Path, plan: Plan, tmp_path: Path
) -> None:
    output = tmp_path / "report.html"
    assert main(["report", str(engine), "--output", str(output)]) == 0
    page = ReportPage(output.read_text(encoding="utf-8"))
    page_sections, why = page.by("plan.json")[0], page.by("dispatch tables of the ops")[0]
    for entry in plan.programs:
        place = page_sections.cells.index(entry.name)
        assert page_sections.cells[place + 1 : place + 3] == [str(entry.batch), str(entry.rows)]
    assert {kernel.name for kernel in plan.kernels} <= set(page_sections.cells)
    files = {kernel.name.partition(":")[0] for kernel in plan.kernels}
    assert set(why.cells[::3]) <= files
    assert {f for f in files if f.startswith("paged_tree_attention/")} & set(why.cells[::3])
    assert "specbuild tune" in page.sections["costs"]


def test_step_costs_are_curves_of_batches() -> None:
    rows = [
        StepCostRow(batch, "none", 1, context, 1e-3 * batch + 1e-7 * context, 1e-3, 0.0, 1e9)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for context in (0, 4096)
    ]
    (drawn, table) = costs_figures(StepCostFacts("H200", "m", True, tuple(rows)), None)
    page = ReportPage(f"<section id='costs'>{drawn}{table}</section>")
    batches = {round(y - 0.0001 * x, 6) for x, y in page.figures[0].marks if y is not None}
    assert len(batches) == 6 and {1.0, 128.0} <= batches
    assert page.figures[1].cells.count("none") == len(rows)


def test_an_estimate_needs_no_gpu(
    engine: Path, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, prefill = tmp_path / "tuned", tmp_path / "prefill.json"
    shutil.copytree(engine, tuned)
    prefill.write_text(PREFILL.read_text())
    words = ["estimate", str(tuned), "--costs", str(prefill), "--gpu", "h200", "--json",
             "--prompt-tokens", "8", "--output-tokens", "5", "--requests", "1"]  # fmt: skip
    assert main(words) == 2 and "holds no step costs" in capsys.readouterr().err
    manifest = read_manifest(tuned)
    steps = tuple(ShapeCosts(b, 0, 0, 0, (0,), (0.25,), (0.0,)) for b in (1, 2))
    costs = StepCosts("NVIDIA H200", programs_digest(manifest), METHOD, steps)
    rewrite_engine(tuned, {STEP_COSTS_FILE: to_bytes(costs)})
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    shortest_s = min(phase["time_s"] for phase in json.loads(PREFILL.read_text())["phases"])
    assert result["machine"] == "NVIDIA H200"
    assert result["ttft_s"]["mean"] == pytest.approx(shortest_s)
    assert result["tpot_s"]["mean"] == pytest.approx(0.25)
    other = [word if word != "h200" else "h100" for word in words]
    assert main(other) == 2 and "measured on NVIDIA H200" in capsys.readouterr().err
    bare = [word for word in words if word not in ("--costs", str(prefill))]
    assert main(bare) == 2 and "runs on a GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_equal_builds_are_equal_byte_for_byte(
    engine: Path, checkpoints: Path, tmp_path: Path
) -> None:
    with exported_anew():
        build(options(checkpoints, tmp_path / "again"), SilentProgress())
    first, second = (
        {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (engine, tmp_path / "again")
    )
    assert first == second


def test_the_engine_contains_no_paths_of_this_machine(engine: Path, checkpoints: Path) -> None:
    for file in engine.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for leak in (str(checkpoints), str(Path(__file__).parents[3])):
                assert leak.encode() not in data, file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "sm_100a"}, "--gpu 'sm_100a' is not supported"),
        ({"gpu": ""}, "--gpu '' is not supported"),
        ({"backend": "cpu"}, "--gpu sm_90a needs --backend cuda"),
        ({"backend": "cpu", "gpu": None, "draft_dtype": "fp8"}, "--draft-dtype fp8 needs"),
        ({"page_size": 24}, "--page-size 24"),
        ({"max_batch_size": 300}, "--max-batch-size 300"),
        (
            {"draft_top_k": 8, "draft_depth": 8, "draft_tokens": 300, "max_seq_len": 400},
            "--draft-tokens 300",
        ),
    ],
)
def test_rejects_unsupported_builds(
    checkpoints: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        build(options(checkpoints, tmp_path / "engine", **changes), SilentProgress())
    assert not (tmp_path / "engine").exists()
