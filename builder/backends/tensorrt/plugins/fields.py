"""Serializes an op's launches at every size of an engine as the record that its plugin reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled
from specbuild.builder.backends.cuda.plan.plan_writer import number_argument
from specbuild.builder.backends.tensorrt.plugins.versions import plugin_version
from specbuild.plugins_cuda.launches import (
    Argument,
    Kernel,
    Lowering,
    PeerPointer,
    TensorInfo,
)
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.runtime.engine_dir.plan import NULL, POINTER, Launch
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.plugin_record import (
    RECORD_FORMAT,
    PluginBucket,
    PluginInput,
    PluginOutput,
    PluginRecord,
    PluginTactic,
    PluginWorkspace,
    wire_shape,
)


@dataclass(frozen=True)
class PluginForm:
    """An op at one set of sizes: its present tensors by declared name, and its launches.

    A tensor can have more axes than the op declares: the op then flattens the trailing axes.
    ``lowerings`` are candidates with equal bits wherever the runtime depends on them.
    """

    tensors: Mapping[str, TensorInfo]
    lowerings: tuple[Lowering, ...]


@dataclass(frozen=True)
class PluginOp:
    """The op of a node at all sizes. All forms have the same tensors."""

    op: OpSpec
    forms: tuple[PluginForm, ...]

    @property
    def inputs(self) -> list[TensorSpec]:
        """The present inputs in declared order."""
        return [spec for spec in self.op.inputs if spec.name in self.forms[0].tensors]

    @property
    def outputs(self) -> list[TensorSpec]:
        """The present outputs in declared order."""
        return [spec for spec in self.op.outputs if spec.name in self.forms[0].tensors]

    @property
    def kernels(self) -> list[Kernel]:
        """The distinct kernels in the order of first use."""
        return list(
            dict.fromkeys(
                launch.kernel
                for form in self.forms
                for lowering in form.lowerings
                for launch in lowering.launches
            )
        )


def plugin_record(
    plugin: PluginOp, compiled: Compiled, gpu: str, *, in_network: bool = True
) -> tuple[PluginRecord, dict[str, bytes]]:
    """Return the record and the cubins that it names.

    Without ``in_network`` the record omits the rules for output shapes, which only TensorRT needs.
    Raises SpecbuildError if TensorRT could not infer a shape or accept a tensor.
    """
    first = plugin.forms[0].tensors
    names = [spec.name for spec in plugin.inputs]
    aliases = dict(plugin.op.aliases)
    kernels = plugin.kernels
    record = PluginRecord(
        format=RECORD_FORMAT,
        op=plugin.op.name,
        version=plugin_version(plugin.op),
        gpu=gpu,
        inputs=tuple(PluginInput(name, first[name].dtype) for name in names),
        outputs=tuple(
            PluginOutput(
                name=spec.name,
                dtype=first[spec.name].dtype,
                axes=_axes(plugin, spec) if in_network else (),
                alias=names.index(aliases[spec.name]) if spec.name in aliases else None,
            )
            for spec in plugin.outputs
        ),
        kernels=tuple(compiled.kernels[kernel] for kernel in kernels),
        buckets=tuple(_bucket(plugin, form, kernels) for form in plugin.forms),
    )
    for tensor, shape in zip(record.inputs, record.buckets[0].inputs, strict=True):
        wire_shape(tensor.dtype, shape)
    return record, {kernel.cubin: compiled.files[kernel.cubin] for kernel in record.kernels}


def _axes(plugin: PluginOp, output: TensorSpec) -> tuple[tuple[int, ...], ...]:
    """Map each axis to the first input with the same axis, or to its size in all forms."""
    axes: list[tuple[int, ...]] = []
    for index, axis in enumerate(output.axes):
        source = _source(plugin, axis)
        sizes = {form.tensors[output.name].shape[index] for form in plugin.forms}
        if source is not None:
            axes.append(source)
        elif len(sizes) == 1:
            axes.append((sizes.pop(),))
        else:
            raise SpecbuildError(
                f"{plugin.op.name}.{output.name}: axis {axis} has the sizes {sorted(sizes)} and no "
                "input has the same axis, so a TensorRT plugin cannot infer it"
            )
    return tuple(axes)


def _source(plugin: PluginOp, axis: str) -> tuple[int, int] | None:
    if axis.isdigit():
        return None
    for index, spec in enumerate(plugin.inputs):
        if spec.rank_free or axis not in spec.axes:
            continue
        position, info = spec.axes.index(axis), plugin.forms[0].tensors[spec.name]
        is_flattened = len(info.shape) > len(spec.axes) and position == len(spec.axes) - 1
        if info.dtype != "uint8" and not is_flattened:
            return index, position
    return None


def _bucket(plugin: PluginOp, form: PluginForm, kernels: Sequence[Kernel]) -> PluginBucket:
    return PluginBucket(
        inputs=tuple(form.tensors[spec.name].shape for spec in plugin.inputs),
        outputs=tuple(form.tensors[spec.name].shape for spec in plugin.outputs),
        tactics=tuple(_tactic(plugin, lowering, kernels) for lowering in form.lowerings),
    )


def _tactic(plugin: PluginOp, lowering: Lowering, kernels: Sequence[Kernel]) -> PluginTactic:
    tensors = [spec.name for spec in (*plugin.inputs, *plugin.outputs)]
    buffers = [*tensors, *(workspace.name for workspace in lowering.workspaces)]
    launches = [
        Launch(
            kernel=kernels.index(launch.kernel),
            op=0,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            arguments=tuple(_argument(plugin.op, buffers, a) for a in launch.arguments),
            # The work queued before the first launch belongs to TensorRT, or clears a workspace.
            programmatic=previous is not None and launch.may_start_early(previous),
        )
        for previous, launch in zip((None, *lowering.launches), lowering.launches, strict=False)
    ]
    workspaces = [PluginWorkspace(w.nbytes, w.zeroed) for w in lowering.workspaces]
    return PluginTactic(tuple(launches), tuple(workspaces))


def _argument(op: OpSpec, buffers: Sequence[str], argument: Argument) -> tuple[int, ...]:
    if isinstance(argument, PeerPointer):
        raise AssertionError(f"{op.name} reads the memory of other ranks, which plugins lack")
    if not isinstance(argument, str):
        return number_argument(argument)
    if argument in buffers:
        return (POINTER, buffers.index(argument), 0)
    op.tensor(argument)  # raises KeyError unless it is an absent optional tensor
    return (NULL,)
