"""Builds the engines of all roles into the engine directory, one process at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from specbuild.builder.backends.tensorrt.build_engine import build_engine
from specbuild.builder.backends.tensorrt.request import EngineRequest, EngineResult, RoleReport
from specbuild.builder.backends.tensorrt.standard.profiles import input_shapes
from specbuild.builder.engine.tensorrt_engines import TensorRtEngine, TensorRtEngines
from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.graph.passes.portable import portable_proto
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, ShapeProfile, TensorRtBuild
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, read_header


def engine_file(role: str) -> str:
    """Return the file name of a role's engine."""
    return f"{role}.engine"


def engine_builder(
    models: Mapping[str, ir.Model],
    profiles: Mapping[str, tuple[ShapeProfile, ...]],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    progress: Progress,
) -> Callable[[EngineFolder], tuple[TensorRtEngines, dict[str, RoleReport]]]:
    """Return :func:`build_engines` with everything bound but the folder."""
    return lambda folder: build_engines(folder, models, profiles, capabilities, options, progress)


def build_engines(  # noqa: PLR0917
    folder: EngineFolder,
    models: Mapping[str, ir.Model],
    profiles: Mapping[str, tuple[ShapeProfile, ...]],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    progress: Progress,
) -> tuple[TensorRtEngines, dict[str, RoleReport]]:
    """Write ``<role>.engine`` for every graph. Raises SpecbuildError like :func:`build_engine`.

    A role's weights are written to a temporary file alongside the directory and mapped while its
    engine is built, so only the library holds them in memory. In stripped engines each weight is an
    input, which the runtime binds to device memory.
    """
    roles, reports, version = {}, {}, ""
    for role, model in models.items():
        with tempfile.TemporaryDirectory(
            dir=folder.path.parent, prefix=".specbuild-graph-"
        ) as temporary:
            engine = folder.path / engine_file(role)
            request = _request(
                model, profiles[role], capabilities, options, engine, Path(temporary)
            )
            if request.weights is not None:
                EngineFolder(Path(temporary)).write_weights(_weights(model), progress)
            result = build_engine(request, progress)
        progress.note(_summary(request, result))
        folder.adopt(engine_file(role))
        bound = tuple(_weights(model)) if options.tensorrt.strip_weights else ()
        _check_result(role, model, bound, request, result)
        version = result.version
        roles[role] = TensorRtEngine(engine_file(role), profiles[role], result.layers, bound)
        reports[role] = result.report
    build = TensorRtBuild(
        library=LIBRARIES[options.backend].module,
        version=version,
        compute_capabilities=capabilities,
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
    )
    return TensorRtEngines(build, roles), reports


def _request(  # noqa: PLR0917
    model: ir.Model,
    profiles: tuple[ShapeProfile, ...],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    engine: Path,
    at: Path,
) -> EngineRequest:
    graph, proto = at / "graph.onnx", portable_proto(model)
    includes_weights = not options.tensorrt.strip_weights
    if not includes_weights:
        weights_to_inputs(proto, _weights(model))
    graph.write_bytes(proto.SerializeToString(deterministic=True))
    cache = options.tensorrt.timing_cache
    return EngineRequest(
        backend=options.backend,
        role=engine.stem,
        graph=str(graph),
        weights=str(at / WEIGHTS_FILE) if includes_weights and _weights(model) else None,
        engine=str(engine),
        ops=tuple(sorted({(node.domain, node.op_type) for node in model.graph.all_nodes()})),
        profiles=tuple(input_shapes(model.graph.inputs, profile) for profile in profiles),
        compute_capabilities=capabilities,
        timing_cache=None if cache is None else str(cache.resolve()),
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
        weight_streaming=options.tensorrt.weight_streaming,
    )


def _summary(request: EngineRequest, result: EngineResult) -> str:
    return (
        f"{request.role}.engine: {result.engine_bytes / 1e6:.1f} MB in {result.seconds:.0f} s, "
        f"peak memory {result.peak_anonymous_bytes / 1e6:.0f} MB, "
        f"{result.parsed_anonymous_bytes / 1e6:.0f} MB before compiling"
    )


def _weights(model: ir.Model) -> dict[str, Recipe]:
    recipes = {name: recipe_of(value) for name, value in model.graph.initializers.items()}
    return {name: recipe for name, recipe in recipes.items() if recipe is not None}


def weights_to_inputs(proto: onnx.ModelProto, names: Collection[str]) -> None:
    """Change these initializers to inputs, after the graph's own and in their order."""
    graph = proto.graph
    initializers = list(graph.initializer)
    del graph.initializer[:]
    for tensor in initializers:
        if tensor.name in names:
            port = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(port)
        else:
            graph.initializer.append(tensor)


def _check_result(
    role: str, model: ir.Model, bound: Sequence[str], request: EngineRequest, result: EngineResult
) -> None:
    """Raise SpecbuildError if the engine differs from the request in ports, GPUs or version."""
    expected = [(value.name, True) for value in model.graph.inputs]
    expected += [(name, True) for name in bound]
    expected += [(value.name, False) for value in model.graph.outputs]
    actual = [(binding.name, binding.is_input) for binding in result.bindings]
    if actual != expected:
        different = sorted({str(name) for name, _ in set(actual) ^ set(expected)})
        raise SpecbuildError(
            f"{engine_file(role)}: {LIBRARIES[request.backend].title} changed the inputs and "
            f"outputs of the graph ({', '.join(different) or 'another order'}); use another version"
        )
    if LIBRARIES[request.backend].has_engine_headers:
        with Path(request.engine).open("rb") as file:
            header = read_header(file.read(64), engine_file(role))
        built = (result.version, set(request.compute_capabilities), result.engine_bytes)
        if (header.version, set(header.compute_capabilities), header.engine_bytes) != built:
            raise SpecbuildError(
                f"{engine_file(role)}: got the header {header}, expected {built}; this version of "
                "the library writes headers that specbuild does not support"
            )
