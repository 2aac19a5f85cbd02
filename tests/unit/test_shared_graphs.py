"""A graph that a run exports once is what an export gives, for all that agree in what it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from planning import plan_engine
from shared_graphs import exported_anew
from traced_reads import Reads, agree, traced

from specbuild.builder import graphs
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.graph.passes.metadata import clear_metadata
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.geometry import Eagle3Geometry, TargetGeometry


def nodes(model: ir.Model) -> list[str]:
    model = model.clone()
    clear_metadata(model)
    return [str(node) for node in model.graph]


def geometries(target: Path, draft: Path) -> tuple[TargetGeometry, Eagle3Geometry]:
    geometry = read_target(target, strict=True).geometry
    return geometry, read_draft(draft, geometry, strict=True).geometry


def test_a_shared_graph_is_the_exported_one_and_nobody_elses(
    target_path: Path, draft_path: Path
) -> None:
    g, d = geometries(target_path, draft_path)
    plan = plan_engine(BuildOptions(model=target_path, output=Path("unused")), g, d)
    with exported_anew():
        wanted = graphs.draft_fuse_graph(d, g, plan, torch.bfloat16)
    first = graphs.draft_fuse_graph(d, g, plan, torch.bfloat16)
    assert nodes(first) == nodes(wanted)
    assert list(first.graph.initializers) == list(wanted.graph.initializers)
    first.graph.outputs[0].name = "changed"
    assert graphs.draft_fuse_graph(d, g, plan, torch.bfloat16).graph.outputs[0].name == "hidden"


def test_a_second_build_exports_nothing(
    target_path: Path, draft_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = read_target(target_path, strict=True)
    draft = read_draft(draft_path, target.geometry, strict=True)
    options = BuildOptions(model=target_path, output=Path("unused"))
    plan = plan_engine(options, target.geometry, draft.geometry)

    def built() -> dict[str, ir.Model]:
        return graphs.export_graphs(WeightSources(target, [draft]), plan, SilentProgress())

    first = built()
    assert {"target", "draft_fuse", "draft"} <= first.keys()
    monkeypatch.setattr(graphs, "export_module", None)
    assert built().keys() == first.keys()


def test_what_was_read_decides_and_nothing_else(target_path: Path, draft_path: Path) -> None:
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
