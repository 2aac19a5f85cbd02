"""A graph that a run exports once is shared by all exports with equal inputs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import onnx_ir as ir
import pytest
import torch
from engine_sizes import compute_engine_sizes
from shared_graphs import exported_anew, exporter_digest, exporter_sources
from source_tree import SourceTree, source_tree
from traced_reads import Reads, agree, traced

from specbuild.builder import graphs
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.graph.passes.cleanup import clear_metadata
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def nodes(model: ir.Model) -> list[str]:
    model = model.clone()
    clear_metadata(model)
    return [str(node) for node in model.graph]


def geometries(target: Path, draft: Path) -> tuple[TargetGeometry, Eagle3Geometry]:
    geometry = read_target(target, strict=True).geometry
    return geometry, read_draft(draft, geometry, strict=True).geometry


def test_a_shared_graph_equals_an_export(target_path: Path, draft_path: Path) -> None:
    g, d = geometries(target_path, draft_path)
    engine_sizes = compute_engine_sizes(
        BuildOptions(model=target_path, output=Path("unused")), g, d
    )
    with exported_anew():
        expected = graphs.draft_fuse_graph(d, g, engine_sizes, torch.bfloat16)
    first = graphs.draft_fuse_graph(d, g, engine_sizes, torch.bfloat16)
    assert nodes(first) == nodes(expected)
    assert list(first.graph.initializers) == list(expected.graph.initializers)
    first.graph.outputs[0].name = "changed"
    assert (
        graphs.draft_fuse_graph(d, g, engine_sizes, torch.bfloat16).graph.outputs[0].name
        == "hidden"
    )


def test_a_second_build_exports_nothing(
    target_path: Path, draft_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = read_target(target_path, strict=True)
    draft = read_draft(draft_path, target.geometry, strict=True)
    options = BuildOptions(model=target_path, output=Path("unused"))
    engine_sizes = compute_engine_sizes(options, target.geometry, draft.geometry)

    def built() -> dict[str, ir.Model]:
        return graphs.export_graphs(WeightSources(target, [draft]), engine_sizes, SilentProgress())

    first = built()
    assert {"target", "draft_fuse", "draft"} <= first.keys()
    monkeypatch.setattr(graphs, "export_module", None)
    assert built().keys() == first.keys()


def test_only_values_that_an_export_reads_matter(target_path: Path, draft_path: Path) -> None:
    g, d = geometries(target_path, draft_path)
    reads: Reads = {}
    target, draft = (traced(value, (i,), reads) for i, value in enumerate((g, d)))
    assert (target.hidden, draft.rope.theta) == (g.hidden, d.rope.theta)
    assert agree(reads, (g, d))
    assert agree(reads, (replace(g, vocab=g.vocab + 1), replace(d, vocab=1)))
    assert not agree(reads, (replace(g, hidden=g.hidden + 1), d))
    assert not agree(reads, (g, replace(d, rope=replace(d.rope, theta=1.0))))
    assert target == g and hash(draft) == hash(d)
    assert not agree(reads, (replace(g, vocab=g.vocab + 1), d))


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that an export runs, and of some that it does not."""
    root = tmp_path_factory.mktemp("tree")
    tree = source_tree()
    for file in (*exporter_sources(tree), *(tree.root / name for name in UNREAD)):
        copied = root / file.relative_to(tree.root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copyfile(file, copied)
    return root


READ = (
    "builder/graphs.py",
    "builder/families/parts/grouped_model.py",
    "builder/families/parts/attention.py",
    "builder/graph/export.py",
    "plugins_cuda/linear/op.py",
    "plugins_cuda/paged_tree_attention/__init__.py",
    "plugins_cuda/torch_ops.py",
    "runtime/engine_dir/geometry.py",
    "tests/seed_oss_family/family.py",
)
UNREAD = ("runtime/decode/scheduler.py", "cli/main.py", "plugins_cuda/linear/kernel.cu")


def test_an_export_is_stored_under_a_digest_of_its_code(copied_tree: Path) -> None:
    assert exporter_digest(SourceTree(copied_tree)) == exporter_digest(source_tree())


@pytest.mark.parametrize(
    ("name", "counts"), [*((name, True) for name in READ), *((name, False) for name in UNREAD)]
)
def test_a_changed_source_misses_if_exports_run_it(
    copied_tree: Path, name: str, counts: bool
) -> None:
    file = copied_tree / name
    before, digest = file.read_bytes(), exporter_digest(source_tree())
    file.write_bytes(before + b"\n# changed\n")
    try:
        assert (exporter_digest(SourceTree(copied_tree)) != digest) == counts
    finally:
        file.write_bytes(before)


def test_an_export_runs_no_code_outside_of_its_digest() -> None:
    """The digest covers every module that a process loads with the exporter."""
    code = """
import sys
from pathlib import Path
import torch
from specbuild.builder import graphs
from specbuild.builder.graph import export
export.register_schemas()
export.register_torch_ops()
for name, module in sorted(sys.modules.items()):
    if name.startswith("specbuild.") and getattr(module, "__file__", None):
        print(module.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {Path(line).resolve() for line in done.stdout.split()}
    tree = source_tree()
    covered = {file.resolve() for file in exporter_sources(tree)}
    assert len(loaded) > 100
    assert not loaded - covered
