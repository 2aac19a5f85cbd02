"""Lowers the roles that are single ops to files of launches, which need no TensorRT engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled
from specbuild.builder.backends.cuda.step.fused_graph import WeightTensors, attributes_of
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.tensorrt.plugins.fields import PluginForm, PluginOp, plugin_record
from specbuild.builder.backends.tensorrt.plugins.role_sizes import RoleSizes
from specbuild.builder.graph.passes.weights import ONNX_DTYPES, recipe_of
from specbuild.plugins_cuda.launches import Kernel, TensorInfo
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.executors.tensorrt.launched_role import LaunchedRole, RoleCall

_NAMES = {dtype: str(torch).removeprefix("torch.") for torch, dtype in ONNX_DTYPES.items()}


@dataclass(frozen=True)
class LoweredRole:
    """Distinct ops at every size, and their calls by the names of tensors."""

    plugins: tuple[PluginOp, ...]
    calls: tuple[RoleCall, ...]

    @property
    def kernels(self) -> list[Kernel]:
        """The distinct kernels."""
        return list(dict.fromkeys(k for plugin in self.plugins for k in plugin.kernels))

    def compiled(self, compiled: Compiled, gpu: str) -> LaunchedRole:
        """Return the contents of the engine's file."""
        records = [
            plugin_record(plugin, compiled, gpu, in_network=False) for plugin in self.plugins
        ]
        cubins = {name: code for _, files in records for name, code in files.items()}
        return LaunchedRole(tuple(record for record, _ in records), cubins, self.calls)


def lower_role(
    role: str, model: ir.Model, sizes: RoleSizes, weights: WeightTensors, lowering: CallLowering
) -> LoweredRole:
    """Lower every node at the sizes of each profile. Nodes with equal launches share a record.

    Raises SpecbuildError if an op has no kernels for these sizes.
    """
    plugins: dict[str, tuple[int, PluginOp]] = {}
    calls = []
    for node in model.graph:
        forms = []
        for axes in sizes.every():
            call = _call(role, node, axes, weights)
            tensors = {name: tensor.info for name, tensor in call.tensors.items()}
            forms.append(PluginForm(tensors, (lowering.choice(call, "decode").lowering,)))
        plugin = PluginOp(op_named(node.op_type), tuple(forms))
        index, _ = plugins.setdefault(repr((node.op_type, forms)), (len(plugins), plugin))
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        calls.append(RoleCall(index, tuple(str(value.name) for value in values)))
    return LoweredRole(tuple(plugin for _, plugin in plugins.values()), tuple(calls))


def _call(role: str, node: ir.Node, axes: Mapping[str, int], weights: WeightTensors) -> Call:
    program = ProgramIr(role, "decode")
    op = op_named(node.op_type)
    # zip without strict: a graph may omit trailing optional inputs.
    inputs = {
        spec.name: _tensor(value, axes, weights)
        for spec, value in zip(op.inputs, node.inputs, strict=False)
        if value is not None
    }
    program.call(node.op_type, inputs, attributes_of(node), sizes=axes)
    return program.calls[0]


def _tensor(value: ir.Value, axes: Mapping[str, int], weights: WeightTensors) -> Tensor:
    assert value.name is not None and value.shape is not None and value.dtype is not None
    recipe = recipe_of(value)
    if recipe is not None:
        return weights.tensor(value.name, recipe)
    shape = tuple(s if isinstance(s, int) else axes[str(s.value)] for s in value.shape)
    info = TensorInfo(shape, _NAMES[value.dtype])
    return Tensor(Storage(value.name, "state", info.nbytes), 0, info)
