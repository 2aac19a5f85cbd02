"""One TensorRT plugin for every op, with a behaviour that its fields define.

It consists of ``IPluginV3`` with its core, build and runtime capabilities, and the creator. Answers
about shapes, types, formats or memory are read from the record; ``enqueue`` queues the recorded
launches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import (
    FIELD_NAMES,
    NAMESPACE,
    PluginRecord,
    read_fields,
    wire_dtype,
    wire_shapes,
)

OpenGpu = Callable[[], Gpu]
# Element types of a record by the names of ``tensorrt.DataType``.
_TRT_TYPES: Mapping[str, str] = {"bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32"}


class FieldCollection:
    """Fields in TensorRT's structure, ``value``, which is valid as long as this object.

    TensorRT copies the structure but not the data that it points to. A list cannot replace it:
    pybind11 converts one only inside a call from Python, and TensorRT also calls from elsewhere.
    """

    def __init__(self, trt: Any, arrays: Mapping[str, np.ndarray]) -> None:
        kind = trt.PluginFieldType.CHAR
        self._fields = [trt.PluginField(name, array, kind) for name, array in arrays.items()]
        self._array = trt.PluginFieldCollection(self._fields)
        self.value = trt.PluginFieldCollection_(self._array)


class LoadedFields:
    """The fields of a node as TensorRT stores them, and their parsed form; many nodes share one."""

    def __init__(self, fields: Mapping[str, bytes], open_gpu: OpenGpu) -> None:
        self.record, cubins = read_fields(fields)
        self.arrays = {name: np.frombuffer(fields[name], np.int8) for name in FIELD_NAMES}
        self.digest = _digest(fields)
        self.buckets = {
            wire_shapes(self.record.inputs, bucket.inputs): index
            for index, bucket in enumerate(self.record.buckets)
        }
        self._cubins = cubins
        self._open_gpu = open_gpu
        self._launcher: OpLauncher | None = None
        self._collection: FieldCollection | None = None

    def collection(self, trt: Any) -> FieldCollection:
        """Return the fields in the structure of a TensorRT module."""
        if self._collection is None:
            self._collection = FieldCollection(trt, self.arrays)
        return self._collection

    @property
    def launcher(self) -> OpLauncher:
        """The op on the GPU, which is opened at the first run."""
        if self._launcher is None:
            self._launcher = OpLauncher(self._open_gpu(), self.record, self._cubins)
        return self._launcher


class OpPlugin:
    """The plugin, without TensorRT's base classes: :func:`plugin_classes` adds them.

    TensorRT reads the public attributes.
    """

    plugin_name: str
    plugin_version: str
    plugin_namespace: str
    num_outputs: int
    format_combination_limit: int
    timing_cache_id: str
    metadata_string: str
    _trt: Any

    def set_up(self, loaded: LoadedFields, bucket: int | None = None, tactic: int = 0) -> None:
        """Store its fields, and the bucket and tactic of its configuration."""
        record = loaded.record
        self._loaded = loaded
        self._bucket = bucket
        self._tactic = tactic
        self.plugin_name = record.name
        self.plugin_version = record.plugin_version
        self.plugin_namespace = NAMESPACE
        self.num_outputs = len(record.outputs)
        self.format_combination_limit = 1
        self.timing_cache_id = loaded.digest
        self.metadata_string = f"{record.op} {record.version} {record.gpu}"

    @property
    def record(self) -> PluginRecord:
        """The parsed fields."""
        return self._loaded.record

    # Core.

    def get_capability_interface(self, _type: Any) -> OpPlugin:
        """Return itself: one object has all three capabilities."""
        return self

    def clone(self) -> OpPlugin:
        """Return a plugin with the same fields and configuration."""
        copy = type(self)()
        copy.set_up(self._loaded, self._bucket, self._tactic)
        return copy

    # Build.

    def get_output_data_types(self, _input_types: Sequence[Any]) -> list[Any]:
        """Return the element types of the outputs."""
        return [self._data_type(output.dtype) for output in self.record.outputs]

    def get_output_shapes(
        self, inputs: Sequence[Any], _shape_inputs: Sequence[Any], builder: Any
    ) -> list[Any]:
        """Return each axis as a constant, or as the axis of an input."""
        return [
            self._trt.DimsExprs(
                [
                    builder.constant(axis[0]) if len(axis) == 1 else inputs[axis[0]][axis[1]]
                    for axis in output.axes
                ]
            )
            for output in self.record.outputs
        ]

    def supports_format_combination(
        self, position: int, tensors: Sequence[Any], _num_inputs: int
    ) -> bool:
        """Accept packed rows of the declared type only."""
        record = self.record
        spec = record.tensors[position]
        desc = tensors[position].desc
        linear = desc.format == self._trt.TensorFormat.LINEAR
        return bool(linear and desc.type == self._data_type(spec.dtype))

    def configure_plugin(self, inputs: Sequence[Any], _outputs: Sequence[Any]) -> None:
        """Choose the bucket of a profile by its largest shapes.

        It is None if these are no profile's, as before one is considered; a run chooses again.
        """
        self._bucket = self._loaded.buckets.get(tuple(tuple(tensor.max) for tensor in inputs))

    def get_workspace_size(self, _inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
        """Return the scratch memory of the largest bucket."""
        return self.record.workspace_bytes

    def get_valid_tactics(self) -> list[int]:
        """Return 1 to the number of candidates; none without a choice."""
        if self._bucket is None:
            return []
        count = len(self.record.buckets[self._bucket].tactics)
        return list(range(1, count + 1)) if count > 1 else []

    def get_aliased_input(self, output: int) -> int:
        """Return the input that an output aliases; -1 for none."""
        alias = self.record.outputs[output].alias
        return -1 if alias is None else alias

    # Runtime.

    def attach_to_context(self, _resources: Any) -> OpPlugin:
        """Return a plugin for one execution context."""
        return self.clone()

    def set_tactic(self, tactic: int) -> None:
        """Set the tactic; 0 is the first candidate, as 1 is."""
        self._tactic = max(tactic, 1) - 1

    def on_shape_change(self, inputs: Sequence[Any], _outputs: Sequence[Any]) -> None:
        """Choose the bucket of the next shapes. Raises SpecbuildError if there is none."""
        shapes = tuple(tuple(tensor.dims) for tensor in inputs)
        if shapes not in self._loaded.buckets:
            raise SpecbuildError(
                f"{self.record.name} has no launches for inputs of shapes {list(shapes)}, only for "
                f"{list(self._loaded.buckets)}; build the engine again"
            )
        self._bucket = self._loaded.buckets[shapes]

    def enqueue(
        self,
        input_descriptions: Sequence[Any],
        _output_descriptions: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Queue the launches."""
        self.on_shape_change(input_descriptions, ())
        assert self._bucket is not None
        tactic = self._tactic
        tensors = [*map(int, inputs), *map(int, outputs)]
        self._loaded.launcher.enqueue(
            self._bucket, tensors, int(workspace), int(stream), tactic=tactic
        )

    def get_fields_to_serialize(self) -> Any:
        """Return its fields."""
        return self._loaded.collection(self._trt).value

    def _data_type(self, dtype: str) -> Any:
        return getattr(self._trt.DataType, _TRT_TYPES[wire_dtype(dtype)])


class OpCreator:
    """Creates plugins of one name and version from their fields."""

    name: str
    plugin_version: str
    plugin_namespace: str
    field_names: Any
    _trt: Any

    def set_up(self, name: str, version: str, open_gpu: OpenGpu) -> None:
        """Store its registered name and version, and the GPU of its plugins."""
        self.name = name
        self.plugin_version = version
        self.plugin_namespace = NAMESPACE
        empty = np.zeros(0, np.int8)
        self._names = FieldCollection(self._trt, dict.fromkeys(FIELD_NAMES, empty))
        self.field_names = self._names.value
        self._open_gpu = open_gpu
        self._loaded: dict[str, LoadedFields] = {}

    def create_plugin(self, node: str, collection: Any, _phase: Any) -> OpPlugin:
        """Return the plugin of a node. Raises EngineFileError if the fields are not of this op."""
        fields = {field.name: bytes(np.asarray(field.data).data) for field in collection}
        digest = _digest(fields)
        if digest not in self._loaded:
            self._loaded[digest] = LoadedFields(fields, self._open_gpu)
        loaded = self._loaded[digest]
        record = loaded.record
        if (record.name, record.plugin_version) != (self.name, self.plugin_version):
            raise SpecbuildError(
                f"node {node} asks for {self.name} {self.plugin_version}, its fields are those of "
                f"{record.name} {record.plugin_version}; build the engine again"
            )
        plugin: OpPlugin = plugin_classes(self._trt)[0]()
        plugin.set_up(loaded)
        return plugin


@cache
def plugin_classes(trt: Any) -> tuple[Any, Any]:
    """Return the plugin and the creator as classes of a TensorRT module."""
    interfaces = (
        trt.IPluginV3,
        trt.IPluginV3OneCore,
        trt.IPluginV3OneBuildV2,
        trt.IPluginV3OneRuntime,
    )

    def initialise_plugin(self: Any) -> None:
        for interface in interfaces:
            interface.__init__(self)

    def initialise_creator(self: Any) -> None:
        trt.IPluginCreatorV3One.__init__(self)

    plugin = type("Plugin", (OpPlugin, *interfaces), {"__init__": initialise_plugin, "_trt": trt})
    creator = type(
        "Creator",
        (OpCreator, trt.IPluginCreatorV3One),
        {"__init__": initialise_creator, "_trt": trt},
    )
    return plugin, creator


def _digest(fields: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(fields):
        digest.update(name.encode() + b"\0" + fields[name] + b"\0")
    return digest.hexdigest()
