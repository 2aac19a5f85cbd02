"""Builds a ``tensorrt`` engine: graphs of plugins for the models, launches for the other roles.

The plugins run the ops of the CUDA backend with its kernels, passes and tactics. Weights are inputs
of the TensorRT engines, which the runtime binds to device memory. The engines contain no weights,
so building one needs no memory for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import onnx_ir as ir

from specbuild.builder.backends.backend import MODEL_ROLES
from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Spills
from specbuild.builder.backends.cuda.engine import check_arguments
from specbuild.builder.backends.cuda.sizes import widen_pools, with_padded_latents
from specbuild.builder.backends.cuda.step.fused_graph import FusedGraph, WeightTensors
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.tensorrt.plugins.fields import PluginOp, plugin_record
from specbuild.builder.backends.tensorrt.plugins.graph import PluginFiles, plugin_graph
from specbuild.builder.backends.tensorrt.plugins.launched_roles import LoweredRole, lower_role
from specbuild.builder.backends.tensorrt.plugins.lowering import (
    PluginNode,
    lower_graph,
    refused_size,
    without_candidates,
)
from specbuild.builder.backends.tensorrt.plugins.role_sizes import (
    PREFILL_ROWS,
    RoleSizes,
    exact,
    role_sizes,
)
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.engine.manifest import port_of
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.plugins_cuda.launches import Kernel, Unsupported
from specbuild.runtime.engine_dir.manifest import Port, Role
from specbuild.runtime.executors.tensorrt.launched_role import launched_role_bytes


class KernelCompiler(Protocol):
    """The interface of ``nvrtc.Compiler`` that this module uses."""

    def compile(
        self, kernels: Sequence[Kernel], done: Callable[[], None]
    ) -> Compiled | Unsupported:
        """Return machine code for every kernel; ``done`` is called for each source."""
        ...


@dataclass(frozen=True)
class PluginEngine:
    """An engine before TensorRT compiles it.

    ``graphs`` has the ONNX files of the roles that TensorRT compiles. ``files`` has the contents of
    other files by name. ``plugins`` has plugin versions by name.
    """

    engine_sizes: EngineSizes
    roles: dict[str, Role]
    graphs: dict[str, bytes]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    plugins: dict[str, str]
    refused: tuple[Unsupported, ...] = ()


@dataclass(frozen=True)
class LoweredRoles:
    """Every role lowered at all its sizes, before kernels are compiled."""

    engine_sizes: EngineSizes
    sizes: Mapping[str, RoleSizes]
    graphs: Mapping[str, Sequence[PluginNode]]
    launched: Mapping[str, LoweredRole]
    weights: WeightTensors
    refused: tuple[Unsupported, ...] = ()

    @property
    def plugins(self) -> list[PluginOp]:
        """The ops of all roles."""
        nodes = [node.plugin for nodes in self.graphs.values() for node in nodes]
        return [*nodes, *(plugin for role in self.launched.values() for plugin in role.plugins)]

    @property
    def kernels(self) -> list[Kernel]:
        """The distinct kernels of all roles."""
        return list(dict.fromkeys(k for plugin in self.plugins for k in plugin.kernels))

    def without_candidates(self, kernels: frozenset[Kernel]) -> LoweredRoles:
        """Return the same roles without the candidates that launch any of these kernels."""
        graphs = {
            role: [replace(n, plugin=without_candidates(n.plugin, kernels)) for n in nodes]
            for role, nodes in self.graphs.items()
        }
        return replace(self, graphs=graphs)


def lower_roles(
    models: Mapping[str, ir.Model], engine_sizes: EngineSizes, lowering: CallLowering
) -> LoweredRoles:
    """Lower the fused graphs of models and the portable graphs of other roles in ``models``.

    Raises SpecbuildError if an op has no kernels for a size that the limits require.
    """
    has_draft = "draft" in models
    engine_sizes = with_padded_latents(engine_sizes)
    if "commit" in models:
        widen_pools(models["commit"], engine_sizes)
    weights = WeightTensors()
    fused = {role: FusedGraph(role, models[role]) for role in MODEL_ROLES if role in models}
    prefill, refused = _prefill_rows(fused, engine_sizes, weights, lowering, has_draft=has_draft)
    # max_rows changes here, but the caches keep the sizes of the exported graphs.
    engine_sizes = replace(
        engine_sizes,
        limits=replace(engine_sizes.limits, max_rows=max(MAX_DECODE_ROWS, *prefill, 0)),
    )
    sizes = role_sizes(engine_sizes, prefill, has_draft=has_draft)
    graphs = {
        role: lower_graph(graph, sizes[role], weights, lowering) for role, graph in fused.items()
    }
    launched = {
        role: lower_role(role, models[role], sizes[role], weights, lowering)
        for role in models
        if role not in MODEL_ROLES
    }
    return LoweredRoles(engine_sizes, sizes, graphs, launched, weights, refused)


def compile_roles(
    models: Mapping[str, ir.Model],
    lowered: LoweredRoles,
    compiler: KernelCompiler,
    gpu: str,
    done: Callable[[], None] = lambda: None,
) -> PluginEngine | Unsupported:
    """Compile every launch, then write graphs and files.

    Candidates whose kernels spill registers are dropped. If a chosen kernel spills or a source does
    not compile, the reason is returned.
    """
    result = _compiled(lowered, compiler, done)
    if isinstance(result, Unsupported):
        return result
    lowered, compiled = result
    for plugin in lowered.plugins:
        for form in plugin.forms:
            check_arguments(plugin.op.name, form.lowerings, compiled)
    roles, graphs, files = {}, {}, {}
    plugins: dict[str, str] = {}
    for role, nodes in lowered.graphs.items():
        records = _shared([node.plugin for node in nodes], compiled, gpu)
        sizes = lowered.sizes[role]
        graphs[role] = plugin_graph(models[role], records, sizes.fixed).SerializeToString()
        ops = [record.name for record, _ in records]
        plugins |= {record.name: record.plugin_version for record, _ in records}
        roles[role] = _role(f"{role}.engine", models[role], sizes, ops)
    for role, launched in lowered.launched.items():
        file = f"{role}.launches.json"
        files[file] = launched_role_bytes(launched.compiled(compiled, gpu))
        ops = [launched.plugins[call.record].op.name for call in launched.calls]
        roles[role] = _role(file, models[role], lowered.sizes[role], ops)
    recipes = dict(
        sorted(lowered.weights.recipes.items(), key=lambda item: -item[1].dtype.itemsize)
    )
    return PluginEngine(
        lowered.engine_sizes, roles, graphs, files, recipes, plugins, lowered.refused
    )


def _compiled(
    lowered: LoweredRoles, compiler: KernelCompiler, done: Callable[[], None]
) -> tuple[LoweredRoles, Compiled] | Unsupported:
    while True:
        result = compiler.compile(lowered.kernels, done)
        if not isinstance(result, Unsupported):
            return lowered, result
        if not isinstance(result, Spills):
            return result
        remaining = lowered.without_candidates(result.kernels)
        if remaining == lowered:
            return result
        lowered = remaining


def _shared(plugins: Sequence[PluginOp], compiled: Compiled, gpu: str) -> list[PluginFiles]:
    """Return the record of every node; equal nodes share one."""
    distinct: dict[str, PluginFiles] = {}
    records = []
    for plugin in plugins:
        key = repr((plugin.op.name, plugin.forms))
        if key not in distinct:
            distinct[key] = plugin_record(plugin, compiled, gpu)
        records.append(distinct[key])
    return records


def _prefill_rows(
    fused: Mapping[str, FusedGraph],
    engine_sizes: EngineSizes,
    weights: WeightTensors,
    lowering: CallLowering,
    *,
    has_draft: bool,
) -> tuple[tuple[int, ...], tuple[Unsupported, ...]]:
    """Return the supported sizes of prompt chunks, and the reasons against the others."""
    max_prompt_rows = engine_sizes.limits.max_seq_len * engine_sizes.limits.max_batch_size
    supported, refused = [], []
    for rows in PREFILL_ROWS:
        if rows // 2 >= max_prompt_rows:
            break
        sizes = role_sizes(engine_sizes, (), has_draft=has_draft)
        chunk = (exact(T=rows, R=engine_sizes.limits.max_batch_size),)
        reasons = [
            reason
            for role, graph in fused.items()
            for axes in RoleSizes(sizes[role].fixed, chunk).every()
            if (reason := refused_size(graph, axes, weights, lowering)) is not None
        ]
        if reasons:
            refused.append(Unsupported(f"prompt chunks of {rows} rows: {reasons[0].reason}"))
        else:
            supported.append(rows)
    return tuple(supported), tuple(refused)


def _role(file: str, model: ir.Model, sizes: RoleSizes, ops: Sequence[str]) -> Role:
    graph = model.graph
    tensors = [name for name, value in graph.initializers.items() if recipe_of(value) is not None]
    return Role(
        file=file,
        inputs=tuple(_with_fixed_axes(port_of(value), sizes) for value in graph.inputs),
        outputs=tuple(_with_fixed_axes(port_of(value), sizes) for value in graph.outputs),
        tensors=tuple(tensors),
        ops=dict(sorted(Counter(f"specbuild::{name}" for name in ops).items())),
        profiles=sizes.profiles,
    )


def _with_fixed_axes(port: Port, sizes: RoleSizes) -> Port:
    """Return the port with the sizes of its fixed axes."""
    return replace(port, shape=tuple(sizes.fixed.get(size, size) for size in port.shape))
