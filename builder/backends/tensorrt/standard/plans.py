"""Builds every role's engine into the engine directory, one process and one role at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from specbuild.builder.backends.tensorrt.build_engine import build_engine
from specbuild.builder.backends.tensorrt.request import EngineRequest, EngineResult, RoleReport
from specbuild.builder.backends.tensorrt.standard.profiles import input_shapes
from specbuild.builder.engine.tensorrt_plans import BuiltPlan, BuiltPlans
from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.graph.passes.portable import portable_proto
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, ShapeProfile, TensorRtBuild
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.check import LIBRARIES, read_header


def engine_file(role: str) -> str:
    """Where a role's engine stands in the directory."""
    return f"{role}.engine"


def plan_maker(
    models: Mapping[str, ir.Model],
    profiles: Mapping[str, tuple[ShapeProfile, ...]],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    progress: Progress,
) -> Callable[[EngineFolder], tuple[BuiltPlans, dict[str, RoleReport]]]:
    """:func:`build_plans` for a folder that is to come."""
    return lambda folder: build_plans(folder, models, profiles, capabilities, options, progress)


def build_plans(  # noqa: PLR0917
    folder: EngineFolder,
    models: Mapping[str, ir.Model],
    profiles: Mapping[str, tuple[ShapeProfile, ...]],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    progress: Progress,
) -> tuple[BuiltPlans, dict[str, RoleReport]]:
    """Writes ``<role>.engine`` for every graph. Raises SpecbuildError as :func:`build_engine`.

    A role's weights lie in a file beside the directory while its engine is built, and are mapped
    from there: what is held in memory is what the library itself holds. Stripped engines need none
    of them: each is an input, which the runtime binds to where the weight lies on the device.
    """
    roles, reports, version = {}, {}, ""
    for role, model in models.items():
        with tempfile.TemporaryDirectory(dir=folder.path.parent, prefix=".specbuild-graph-") as at:
            engine = folder.path / engine_file(role)
            request = _request(model, profiles[role], capabilities, options, engine, Path(at))
            if request.weights is not None:
                EngineFolder(Path(at)).write_weights(_weights(model), progress)
            result = build_engine(request, progress)
        progress.note(_told(request, result))
        folder.adopt(engine_file(role))
        bound = tuple(_weights(model)) if options.tensorrt.strip_weights else ()
        _check_answer(role, model, bound, request, result)
        version = result.version
        roles[role] = BuiltPlan(engine_file(role), profiles[role], result.layers, bound)
        reports[role] = result.report
    build = TensorRtBuild(
        library=LIBRARIES[options.backend].module,
        version=version,
        compute_capabilities=capabilities,
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
    )
    return BuiltPlans(build, roles), reports


def _request(  # noqa: PLR0917
    model: ir.Model,
    profiles: tuple[ShapeProfile, ...],
    capabilities: tuple[str, ...],
    options: BuildOptions,
    engine: Path,
    at: Path,
) -> EngineRequest:
    graph, proto = at / "graph.onnx", portable_proto(model)
    held = not options.tensorrt.strip_weights
    if not held:
        weights_to_inputs(proto, _weights(model))
    graph.write_bytes(proto.SerializeToString(deterministic=True))
    cache = options.tensorrt.timing_cache
    return EngineRequest(
        backend=options.backend,
        role=engine.stem,
        graph=str(graph),
        weights=str(at / WEIGHTS_FILE) if held and _weights(model) else None,
        engine=str(engine),
        ops=tuple(sorted({(node.domain, node.op_type) for node in model.graph.all_nodes()})),
        profiles=tuple(input_shapes(model.graph.inputs, profile) for profile in profiles),
        compute_capabilities=capabilities,
        timing_cache=None if cache is None else str(cache.resolve()),
        version_compatible=options.tensorrt.version_compatible,
        hardware_compatible=options.tensorrt.hardware_compatible,
        weight_streaming=options.tensorrt.weight_streaming,
    )


def _told(request: EngineRequest, result: EngineResult) -> str:
    return (
        f"{request.role}.engine: {result.engine_bytes / 1e6:.1f} MB in {result.seconds:.0f} s, "
        f"{result.peak_anonymous_bytes / 1e6:.0f} MB of memory held, "
        f"{result.parsed_anonymous_bytes / 1e6:.0f} MB of it before compiling"
    )


def _weights(model: ir.Model) -> dict[str, Recipe]:
    found = {name: recipe_of(value) for name, value in model.graph.initializers.items()}
    return {name: recipe for name, recipe in found.items() if recipe is not None}


def weights_to_inputs(proto: onnx.ModelProto, names: Collection[str]) -> None:
    """Makes inputs of these initialisers, behind the graph's own and in their order."""
    graph = proto.graph
    held = list(graph.initializer)
    del graph.initializer[:]
    for tensor in held:
        if tensor.name in names:
            port = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(port)
        else:
            graph.initializer.append(tensor)


def _check_answer(
    role: str, model: ir.Model, bound: Sequence[str], request: EngineRequest, result: EngineResult
) -> None:
    """The library built what was asked for: the graph's ports, for these GPUs, of this version."""
    wanted = [(value.name, True) for value in model.graph.inputs]
    wanted += [(name, True) for name in bound]
    wanted += [(value.name, False) for value in model.graph.outputs]
    got = [(binding.name, binding.is_input) for binding in result.bindings]
    if got != wanted:
        odd = sorted({str(name) for name, _ in set(got) ^ set(wanted)})
        raise SpecbuildError(
            f"{LIBRARIES[request.backend].title} gave {engine_file(role)} other inputs and outputs "
            f"than the graph has ({', '.join(odd) or 'in another order'}); this is a fault of it"
        )
    if LIBRARIES[request.backend].plans_have_headers:
        with Path(request.engine).open("rb") as file:
            header = read_header(file.read(64), engine_file(role))
        told = (result.version, set(request.compute_capabilities), result.engine_bytes)
        if (header.version, set(header.compute_capabilities), header.plan_bytes) != told:
            raise SpecbuildError(
                f"{engine_file(role)} says of itself {header}, expected {told}; the library writes "
                "headers that this specbuild does not know"
            )
