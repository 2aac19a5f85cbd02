"""Export on the meta device: the portable graph, its names, and its cost at real sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from checkpoints import write_draft, write_target
from safetensors.torch import load_file, save_file

from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.build import build
from specbuild.builder.inputs import read_checkpoints, settled_inputs
from specbuild.builder.kept_graphs import keep_graphs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "export_graph.py"


@pytest.mark.slow
@pytest.mark.parametrize(("geometry", "layers"), [("gpt-oss-20b", 24), ("llama-3.3-70b", 80)])
def test_exports_real_sizes_within_the_budget(geometry: str, layers: int) -> None:
    """Measure processor time, which does not depend on the load of the machine."""
    done = subprocess.run(
        [sys.executable, SCRIPT, geometry], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["attentions"] == layers
    assert result["processor_s"] < 60
    assert result["gigabytes"] < 2


def write_portable(path: Path) -> None:
    """The portable graphs of the target and draft in ``path``, under ``onnx``."""
    options = BuildOptions(model=path / "t", draft=path / "d", output=path / "unused")
    inputs = settled_inputs(options, CPU, read_checkpoints(options, SilentProgress()))
    keep_graphs(path / "onnx", None, inputs, SilentProgress())


def test_the_portable_graph_has_the_tensor_names_of_the_checkpoint(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_target(tmp_path / "t")
    write_draft(tmp_path / "d")
    write_portable(tmp_path)
    with safe_open(tmp_path / "t" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    model = onnx.load(tmp_path / "onnx" / "target.onnx", load_external_data=False)
    named = {initializer.name for initializer in model.graph.initializer}
    assert stored <= named
    assert named - stored == {"rope_cos", "rope_sin"}
    ops = {node.op_type for node in model.graph.node if node.domain == "specbuild"}
    assert ops == {"KvWrite", "PagedTreeAttention", "Moe"}
    text = (tmp_path / "onnx" / "target.onnx").read_bytes()
    for leak in (str(tmp_path).encode(), b"site-packages", b".py"):
        assert leak not in text


def test_dump_passes_writes_the_graph_after_each_pass(tmp_path: Path) -> None:
    write_target(tmp_path / "t")
    options = BuildOptions(
        model=tmp_path / "t", output=tmp_path / "e", dump_passes=tmp_path / "passes"
    )
    report = build(options, SilentProgress())
    names = sorted(path.name for path in (tmp_path / "passes").glob("target.*.onnx"))
    assert names[0] == "target.00-exported.onnx"
    assert len(names) == 1 + sum(result.role == "target" for result in report.passes)
    last = onnx.load(tmp_path / "passes" / names[-1], load_external_data=False)
    assert all(node.domain != "specbuild" for node in last.graph.node)


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(t, marks=pytest.mark.slow) for t in ("f16", "f32")), "mixed"]
)
def test_portable_graphs_are_valid_in_every_type(tmp_path: Path, dtype: str) -> None:
    """Infer types and shapes through every node, as Netron and other tools do."""
    write_target(tmp_path / "t", layers=2, dtype=dtype if dtype != "mixed" else "bf16")
    write_draft(tmp_path / "d", target_layers=2, dtype=dtype if dtype != "mixed" else "f16")
    if dtype == "mixed":
        file = tmp_path / "t" / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if "norm" in name or "q_proj" in name:
                tensors[name] = tensors[name].float()
        save_file(tensors, file, metadata={"format": "pt"})
    write_portable(tmp_path)
    files = sorted((tmp_path / "onnx").glob("*.onnx"))
    assert len(files) == 8
    pools = set()
    for file in files:
        model = onnx.load(file, load_external_data=False)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        pools |= {
            port.type.tensor_type.elem_type
            for port in (*model.graph.input, *model.graph.output)
            if "_pool" in port.name
        }
    assert pools == {{"f16": 10, "f32": 1}.get(dtype, 16)}
