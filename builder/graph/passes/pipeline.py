"""A lowering is a list of passes: functions that change a graph and count the changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from specbuild.builder.graph.passes.portable import save_portable


@dataclass(frozen=True)
class GraphPass:
    """One pass: ``run`` changes the model's graph in place and returns how often it applied."""

    name: str
    run: Callable[[ir.Model], int]


@dataclass(frozen=True)
class PassResult:
    """The number of changes of one pass in one role's graph."""

    role: str
    name: str
    applied: int
    nodes: int


def run_passes(
    role: str, model: ir.Model, passes: Sequence[GraphPass], dump: Path | None
) -> list[PassResult]:
    """Run the passes in order; with ``dump`` the graph after each is written there."""
    results = []
    if dump is not None:
        save_portable(model, dump / f"{role}.00-exported.onnx")
    for index, step in enumerate(passes, start=1):
        applied = step.run(model)
        results.append(PassResult(role, step.name, applied, len(model.graph)))
        if dump is not None:
            save_portable(model, dump / f"{role}.{index:02d}-{step.name}.onnx")
    return results
