"""Builds the engines of a target's plugin graphs with TensorRT on the installed GPU."""

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
from specbuild.builder.engine.tensorrt_engines import TensorRtEngines
from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.manifest import Port, Role, ShapeProfile, SizeRange, TensorRtBuild
from specbuild.runtime.errors import SpecbuildError

BACKEND: Final = "tensorrt"


def build_plugin_engines(
    folder: EngineFolder, engine: PluginEngine, options: BuildOptions, progress: Progress
) -> tuple[TensorRtEngines, dict[str, RoleReport]]:
    """Write ``<role>.engine`` for every plugin graph. Raises SpecbuildError if TensorRT fails."""
    described, reports, results = dict(engine.roles), {}, []
    for role, graph in engine.graphs.items():
        file = engine.roles[role].file
        with tempfile.TemporaryDirectory(dir=folder.path.parent, prefix=".specbuild-graph-") as at:
            path = Path(at) / "graph.onnx"
            path.write_bytes(graph)
            request = engine_request(engine.roles[role], graph, path, folder.path / file, options)
            result = build_engine(request, progress)
        folder.adopt(file)
        _check_bindings(role, graph, result)
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
    return TensorRtEngines(build, {}, described), reports


def engine_request(
    role: Role, graph: bytes, path: Path, engine: Path, options: BuildOptions
) -> EngineRequest:
    """Return the request without a weights file, because the graph's weights are inputs."""
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
    """Return the shapes of inputs with dynamic axes in this profile."""

    def axis(size: int | str) -> SizeRange:
        return profile.axes[size] if isinstance(size, str) else SizeRange(size, size, size)

    return tuple(
        InputShapes(
            port.name,
            min_shape=tuple(axis(size).least for size in port.shape),
            opt_shape=tuple(axis(size).usual for size in port.shape),
            max_shape=tuple(axis(size).most for size in port.shape),
        )
        for port in inputs
        if any(isinstance(size, str) for size in port.shape)
    )


def _check_bindings(role: str, graph: bytes, result: EngineResult) -> None:
    """Raise SpecbuildError if TensorRT's network has other inputs or outputs than the graph."""
    proto = onnx.load_model_from_string(graph).graph
    expected = {value.name for value in (*proto.input, *proto.output)}
    different = sorted(expected ^ {binding.name for binding in result.bindings})
    if different:
        raise SpecbuildError(
            f"{role}.engine: TensorRT changed the inputs and outputs {', '.join(different[:5])} of "
            "the graph; use another version of TensorRT"
        )
