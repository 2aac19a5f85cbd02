"""An engine of the ``tensorrt`` backend: graphs of plugins for the models, launches for the rest.

The plugins are the CUDA target's ops with its kernels, passes and tactics. Weights are inputs of
the engines, which the runtime binds to where ``weights.safetensors`` lies on the device: an engine
holds none, and building one takes no memory for them.
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
from specbuild.builder.backends.cuda.latents import widen_pools, with_padded_latents
from specbuild.builder.backends.cuda.step.fused_graph import FusedGraph, WeightTensors
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.tensorrt.plugins.fields import PluginOp, plugin_record
from specbuild.builder.backends.tensorrt.plugins.graph import Carried, plugin_graph
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
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.plugins_cuda.launches import Kernel, Unsupported
from specbuild.runtime.engine_dir.manifest import Port, Role
from specbuild.runtime.executors.tensorrt.launched_role import launched_role_bytes


class KernelCompiler(Protocol):
    """What makes machine code, as ``nvrtc.Compiler`` does."""

    def compile(
        self, kernels: Sequence[Kernel], done: Callable[[], None]
    ) -> Compiled | Unsupported:
        """Machine code for every kernel; ``done`` is called per source."""
        ...


@dataclass(frozen=True)
class PluginEngine:
    """An engine up to what only TensorRT can do.

    ``graphs`` are the ONNX files of the roles that TensorRT compiles, ``files`` the others' in the
    engine, by their names there. ``plugins`` are the versions of the plugins by name.
    """

    plan: EnginePlan
    roles: dict[str, Role]
    graphs: dict[str, bytes]
    files: dict[str, bytes]
    weights: dict[str, Recipe]
    plugins: dict[str, str]
    refused: tuple[Unsupported, ...] = ()


@dataclass(frozen=True)
class LoweredRoles:
    """Every role at all its sizes, nothing compiled."""

    plan: EnginePlan
    sizes: Mapping[str, RoleSizes]
    graphs: Mapping[str, Sequence[PluginNode]]
    launched: Mapping[str, LoweredRole]
    weights: WeightTensors
    refused: tuple[Unsupported, ...] = ()

    @property
    def plugins(self) -> list[PluginOp]:
        """Every op of every role."""
        nodes = [node.plugin for nodes in self.graphs.values() for node in nodes]
        return [*nodes, *(plugin for role in self.launched.values() for plugin in role.plugins)]

    @property
    def kernels(self) -> list[Kernel]:
        """Every kernel, once."""
        return list(dict.fromkeys(k for plugin in self.plugins for k in plugin.kernels))

    def without_candidates(self, kernels: frozenset[Kernel]) -> LoweredRoles:
        """The same without the candidates that launch any of these."""
        graphs = {
            role: [replace(n, plugin=without_candidates(n.plugin, kernels)) for n in nodes]
            for role, nodes in self.graphs.items()
        }
        return replace(self, graphs=graphs)


def lower_roles(
    models: Mapping[str, ir.Model], plan: EnginePlan, lowering: CallLowering
) -> LoweredRoles:
    """``models`` are the fused graphs of models and the portable ones of the other roles.

    Raises SpecbuildError where an op has no launches for a size that the limits ask for.
    """
    drafted = "draft" in models
    plan = with_padded_latents(plan)
    if "commit" in models:
        widen_pools(models["commit"], plan)
    weights = WeightTensors()
    fused = {role: FusedGraph(role, models[role]) for role in MODEL_ROLES if role in models}
    prefill, refused = _prefill_rows(fused, plan, weights, lowering, drafted=drafted)
    # The caches keep the sizes that the graphs were exported with.
    plan = replace(plan, limits=replace(plan.limits, max_rows=max(MAX_DECODE_ROWS, *prefill, 0)))
    sizes = role_sizes(plan, prefill, drafted=drafted)
    graphs = {
        role: lower_graph(graph, sizes[role], weights, lowering) for role, graph in fused.items()
    }
    launched = {
        role: lower_role(role, models[role], sizes[role], weights, lowering)
        for role in models
        if role not in MODEL_ROLES
    }
    return LoweredRoles(plan, sizes, graphs, launched, weights, refused)


def compile_roles(
    models: Mapping[str, ir.Model],
    lowered: LoweredRoles,
    compiler: KernelCompiler,
    gpu: str,
    done: Callable[[], None] = lambda: None,
) -> PluginEngine | Unsupported:
    """Machine code for every launch, then graphs and files.

    Candidates whose kernels spill registers are left out; where a chosen one does, or a source does
    not compile, that is what is returned.
    """
    found = _compiled(lowered, compiler, done)
    if isinstance(found, Unsupported):
        return found
    lowered, compiled = found
    for plugin in lowered.plugins:
        for form in plugin.forms:
            check_arguments(plugin.op.name, form.lowerings, compiled)
    roles, graphs, files = {}, {}, {}
    plugins: dict[str, str] = {}
    for role, nodes in lowered.graphs.items():
        carried = _shared([node.plugin for node in nodes], compiled, gpu)
        sizes = lowered.sizes[role]
        graphs[role] = plugin_graph(models[role], carried, sizes.fixed).SerializeToString()
        names = [record.name for record, _ in carried]
        plugins |= {record.name: record.plugin_version for record, _ in carried}
        roles[role] = _role(f"{role}.engine", models[role], sizes, names)
    for role, launched in lowered.launched.items():
        file = f"{role}.launches.json"
        files[file] = launched_role_bytes(launched.compiled(compiled, gpu))
        names = [launched.plugins[call.record].op.name for call in launched.calls]
        roles[role] = _role(file, models[role], lowered.sizes[role], names)
    recipes = dict(
        sorted(lowered.weights.recipes.items(), key=lambda item: -item[1].dtype.itemsize)
    )
    return PluginEngine(lowered.plan, roles, graphs, files, recipes, plugins, lowered.refused)


def _compiled(
    lowered: LoweredRoles, compiler: KernelCompiler, done: Callable[[], None]
) -> tuple[LoweredRoles, Compiled] | Unsupported:
    while True:
        found = compiler.compile(lowered.kernels, done)
        if not isinstance(found, Unsupported):
            return lowered, found
        if not isinstance(found, Spills):
            return found
        fewer = lowered.without_candidates(found.kernels)
        if fewer == lowered:
            return found
        lowered = fewer


def _shared(plugins: Sequence[PluginOp], compiled: Compiled, gpu: str) -> list[Carried]:
    """The record of every node; layers that are alike share one."""
    known: dict[str, Carried] = {}
    found = []
    for plugin in plugins:
        key = repr((plugin.op.name, plugin.forms))
        if key not in known:
            known[key] = plugin_record(plugin, compiled, gpu)
        found.append(known[key])
    return found


def _prefill_rows(
    fused: Mapping[str, FusedGraph],
    plan: EnginePlan,
    weights: WeightTensors,
    lowering: CallLowering,
    *,
    drafted: bool,
) -> tuple[tuple[int, ...], tuple[Unsupported, ...]]:
    """The chunks of long prompts that every op of every model takes, and why others are not."""
    most = plan.limits.max_seq_len * plan.limits.max_batch_size
    taken, refused = [], []
    for rows in PREFILL_ROWS:
        if rows // 2 >= most:
            break
        sizes = role_sizes(plan, (), drafted=drafted)
        chunk = (exact(T=rows, R=plan.limits.max_batch_size),)
        reasons = [
            found
            for role, graph in fused.items()
            for axes in RoleSizes(sizes[role].fixed, chunk).every()
            if (found := refused_size(graph, axes, weights, lowering)) is not None
        ]
        if reasons:
            refused.append(Unsupported(f"prompt chunks of {rows} rows: {reasons[0].reason}"))
        else:
            taken.append(rows)
    return tuple(taken), tuple(refused)


def _role(file: str, model: ir.Model, sizes: RoleSizes, ops: Sequence[str]) -> Role:
    graph = model.graph
    tensors = [name for name, value in graph.initializers.items() if recipe_of(value) is not None]
    return Role(
        file=file,
        inputs=tuple(_settled(port_of(value), sizes) for value in graph.inputs),
        outputs=tuple(_settled(port_of(value), sizes) for value in graph.outputs),
        tensors=tuple(tensors),
        ops=dict(sorted(Counter(f"specbuild::{name}" for name in ops).items())),
        profiles=sizes.profiles,
    )


def _settled(port: Port, sizes: RoleSizes) -> Port:
    """The port with the axes that have one size as numbers."""
    return replace(port, shape=tuple(sizes.fixed.get(size, size) for size in port.shape))
