"""Builds the engines of a target's plugin graphs: TensorRT compiles them on the GPU at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from specbuild.builder.backends.tensorrt.build_engine import build_engine
from specbuild.builder.backends.tensorrt.plugins import registration as plugin_registration
from specbuild.builder.backends.tensorrt.plugins.engine import PluginEngine
from specbuild.builder.backends.tensorrt.request import (
    EngineRequest,
    EngineResult,
    InputShapes,
    RoleReport,
)
from specbuild.builder.engine.tensorrt_plans import BuiltPlans
from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.manifest import Port, Role, ShapeProfile, SizeRange, TensorRtBuild
from specbuild.runtime.errors import SpecbuildError

BACKEND: Final = "tensorrt"


def build_plugin_plans(
    folder: EngineFolder, engine: PluginEngine, options: BuildOptions, progress: Progress
) -> tuple[BuiltPlans, dict[str, RoleReport]]:
    """Writes ``<role>.engine`` for every plugin graph. Raises SpecbuildError as TensorRT says."""
    described, reports, results = dict(engine.roles), {}, []
    for role, graph in engine.graphs.items():
        file = engine.roles[role].file
        with tempfile.TemporaryDirectory(dir=folder.path.parent, prefix=".specbuild-graph-") as at:
            path = Path(at) / "graph.onnx"
            path.write_bytes(graph)
            request = engine_request(engine.roles[role], graph, path, folder.path / file, options)
            result = build_engine(request, progress)
        folder.adopt(file)
        _check_answer(role, graph, result)
        described[role] = replace(engine.roles[role], layers=result.layers)
        reports[role] = result.report
        results.append(result)
    build = TensorRtBuild(
        library=BACKEND,
        version=results[0].version,
        compute_capabilities=results[0].compute_capabilities,
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
        plugins=dict(sorted(engine.plugins.items())),
    )
    return BuiltPlans(build, {}, described), reports


def engine_request(
    role: Role, graph: bytes, path: Path, engine: Path, options: BuildOptions
) -> EngineRequest:
    """What is asked of the building process; the graph's weights are inputs, so it needs none."""
    nodes = onnx.load_model_from_string(graph).graph.node
    cache = options.tensorrt.timing_cache
    return EngineRequest(
        backend=BACKEND,
        role=engine.stem,
        graph=str(path),
        weights=None,
        engine=str(engine),
        ops=tuple(sorted({(node.domain, node.op_type) for node in nodes})),
        profiles=tuple(_input_shapes(role.inputs, profile) for profile in role.profiles),
        prepare=f"{plugin_registration.__name__}:register_plugins",
        timing_cache=None if cache is None else str(cache.resolve()),
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
        aliased_plugins=True,
    )


def _input_shapes(inputs: Sequence[Port], profile: ShapeProfile) -> tuple[InputShapes, ...]:
    """The inputs that have an axis of the profile; the others have one shape."""

    def axis(size: int | str) -> SizeRange:
        return profile.axes[size] if isinstance(size, str) else SizeRange(size, size, size)

    return tuple(
        InputShapes(
            port.name,
            least=tuple(axis(size).least for size in port.shape),
            usual=tuple(axis(size).usual for size in port.shape),
            most=tuple(axis(size).most for size in port.shape),
        )
        for port in inputs
        if any(isinstance(size, str) for size in port.shape)
    )


def _check_answer(role: str, graph: bytes, result: EngineResult) -> None:
    """SpecbuildError where TensorRT's network has other ports than the graph."""
    held = onnx.load_model_from_string(graph).graph
    wanted = {value.name for value in (*held.input, *held.output)}
    odd = sorted(wanted ^ {binding.name for binding in result.bindings})
    if odd:
        raise SpecbuildError(
            f"TensorRT gave {role}.engine other inputs and outputs than the graph has "
            f"({', '.join(odd[:5])}); this is a fault of it"
        )
