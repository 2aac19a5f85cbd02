"""The data of a plugin node: the launches of one op, and their machine code.

A record becomes two text fields, which a network, an ONNX node and a serialized engine all store.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.engine_dir.plan import (
    FLOAT32,
    INT32,
    ITEM_BYTES,
    NULL,
    POINTER,
    CompiledKernel,
    Launch,
)
from specbuild.runtime.engine_dir.strict_json import from_json, to_json
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, SpecbuildError
from specbuild.runtime.executors.cuda.kernel_arguments import KernelArguments

RECORD_FORMAT = 1
NAMESPACE = "specbuild"
NAME_PREFIX = "Specbuild"
DESCRIPTION, CUBINS = "description", "cubins"
FIELD_NAMES = (DESCRIPTION, CUBINS)
WORKSPACE_ALIGNMENT = 256

# TensorRT has no plugin tensors of bytes: stored bytes are passed as a row of 32-bit words.
_WIRE: Mapping[str, str] = {"uint8": "int32"}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class PluginInput:
    """A present input of the op, under its declared name."""

    name: str
    dtype: str


@dataclass(frozen=True)
class PluginOutput:
    """A present output. An axis is ``(size,)``, or ``(input, axis)`` with an equal size.

    There are no ``axes`` if no network needs them: each bucket has its own shape.

    ``alias`` is the input that it overwrites; None if it has its own memory.
    """

    name: str
    dtype: str
    axes: tuple[tuple[int, ...], ...]
    alias: int | None = None


@dataclass(frozen=True)
class PluginWorkspace:
    """Scratch memory of a tactic; ``zeroed``: zeros before the first launch."""

    bytes: int
    zeroed: bool


@dataclass(frozen=True)
class PluginTactic:
    """The launches in order. The first one waits for all previously queued work.

    A pointer argument names a buffer: the inputs, then the outputs, then the workspaces.
    """

    launches: tuple[Launch, ...]
    workspaces: tuple[PluginWorkspace, ...]


@dataclass(frozen=True)
class PluginBucket:
    """Shapes of the inputs and outputs, and the tactics for these."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    tactics: tuple[PluginTactic, ...]


@dataclass(frozen=True)
class PluginRecord:
    """One op at every size of an engine, compiled for one architecture.

    A kernel's ``cubin`` is its key among the cubins stored with the record.
    """

    format: int
    op: str
    version: int
    gpu: str
    inputs: tuple[PluginInput, ...]
    outputs: tuple[PluginOutput, ...]
    kernels: tuple[CompiledKernel, ...]
    buckets: tuple[PluginBucket, ...]

    @property
    def name(self) -> str:
        """The plugin's name in TensorRT's registry."""
        return f"{NAME_PREFIX}{self.op}"

    @property
    def plugin_version(self) -> str:
        """The version of its fields: of the record's format, and of the op."""
        return f"{self.format}.{self.version}"

    @property
    def tensors(self) -> tuple[PluginInput | PluginOutput, ...]:
        """The inputs, then the outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def workspace_bytes(self) -> int:
        """The scratch memory of the largest tactic."""
        tactics = (tactic for bucket in self.buckets for tactic in bucket.tactics)
        return max((workspace_places(tactic.workspaces)[-1] for tactic in tactics), default=0)


def workspace_places(workspaces: Sequence[PluginWorkspace]) -> list[int]:
    """Return the offset of each workspace in the scratch memory, and then the total bytes."""
    places = [0]
    for workspace in workspaces:
        aligned = -(-workspace.bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        places.append(places[-1] + aligned)
    return places


def wire_dtype(dtype: str) -> str:
    """Return the element type under which TensorRT sees a tensor."""
    return _WIRE.get(dtype, dtype)


def wire_shape(dtype: str, shape: Sequence[int]) -> Shape:
    """Return a tensor's shape in TensorRT; SpecbuildError if its bytes do not fill words."""
    if dtype not in _WIRE:
        return tuple(shape)
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    words, remainder = divmod(nbytes, ITEM_BYTES[_WIRE[dtype]])
    if remainder:
        raise SpecbuildError(
            f"a plugin's tensor of {nbytes} bytes, shape {tuple(shape)}, is no whole number of "
            "32-bit words; build with --backend cuda"
        )
    return (words,)


def wire_shapes(
    tensors: Sequence[PluginInput], shapes: Sequence[Sequence[int]]
) -> tuple[Shape, ...]:
    """Return the shapes of all inputs."""
    return tuple(wire_shape(t.dtype, shape) for t, shape in zip(tensors, shapes, strict=True))


def write_fields(record: PluginRecord, cubins: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the record as text fields by name, for a node of a network."""
    description = json.dumps(to_json(record), separators=(",", ":")).encode()
    names = dict.fromkeys(kernel.cubin for kernel in record.kernels)
    packed = {name: base64.b85encode(zlib.compress(cubins[name], 9)).decode() for name in names}
    return {DESCRIPTION: description, CUBINS: json.dumps(packed, separators=(",", ":")).encode()}


def read_fields(fields: Mapping[str, bytes]) -> tuple[PluginRecord, dict[str, bytes]]:
    """Return the record and its cubins. Raises EngineFileError if they are invalid."""
    missing = [name for name in FIELD_NAMES if name not in fields]
    if missing:
        raise OutdatedEngineError(f"a plugin node lacks the fields {missing}")
    try:
        description = json.loads(_text(fields[DESCRIPTION]))
        form = description.get("format") if isinstance(description, dict) else None
        if form != RECORD_FORMAT:
            raise EngineFileError(
                f"a plugin node has format {form!r}, this specbuild reads {RECORD_FORMAT}; build "
                "the engine again with this version"
            )
        record = from_json(PluginRecord, description, "plugin")
        packed = json.loads(_text(fields[CUBINS]))
        cubins = {name: zlib.decompress(base64.b85decode(text)) for name, text in packed.items()}
    except EngineFileError:
        raise
    except (
        SpecbuildError, ValueError, zlib.error, AttributeError, TypeError, RecursionError,
    ) as error:  # fmt: skip
        raise OutdatedEngineError(f"a plugin node cannot be read ({error})") from error
    problem = next(_problems(record, cubins), None)
    if problem is not None:
        raise OutdatedEngineError(f"plugin {record.name} is malformed ({problem})")
    kernels = KernelArguments(record.kernels, cubins.__getitem__)
    for bucket in record.buckets:
        for tactic in bucket.tactics:
            kernels.check(tactic.launches, f"plugin {record.name}")
    return record, cubins


def _text(data: bytes) -> bytes:
    """Return a field as written: a parser may have added the zero that ends a C string."""
    return data.rstrip(b"\0")


def _problems(record: PluginRecord, cubins: Mapping[str, bytes]) -> Iterator[str]:
    """Check for values that would access foreign memory or fail during a launch."""
    dtypes = {tensor.dtype for tensor in record.tensors}
    if not dtypes <= set(ITEM_BYTES):
        yield f"element types {sorted(dtypes - set(ITEM_BYTES))}"
        return
    absent = [kernel.entry for kernel in record.kernels if kernel.cubin not in cubins]
    if absent:
        yield f"kernels {absent} without machine code"
    if not all(_is_output(output, len(record.inputs)) for output in record.outputs):
        yield "an output that names no input"
    for bucket in record.buckets:
        if len(bucket.inputs) != len(record.inputs) or len(bucket.outputs) != len(record.outputs):
            yield "a bucket with another number of tensors"
            return
        if not bucket.tactics:
            yield "a bucket without launches"
        shapes = zip(record.tensors, (*bucket.inputs, *bucket.outputs), strict=True)
        sizes = [math.prod(shape) * ITEM_BYTES[tensor.dtype] for tensor, shape in shapes]
        for tactic in bucket.tactics:
            buffers = [*sizes, *(workspace.bytes for workspace in tactic.workspaces)]
            if not all(
                _is_launch(launch, len(record.kernels), buffers) for launch in tactic.launches
            ):
                yield "a launch outside of its buffers"


def _is_output(output: PluginOutput, inputs: int) -> bool:
    axes = all(len(axis) in (1, 2) and min(axis) >= 0 for axis in output.axes)
    named = all(axis[0] < inputs for axis in output.axes if len(axis) == 2)
    return axes and named and (output.alias is None or 0 <= output.alias < inputs)


def _is_launch(launch: Launch, kernels: int, buffer_bytes: Sequence[int]) -> bool:
    sizes = (*launch.grid, launch.block)
    return (
        0 <= launch.kernel < kernels
        and len(launch.grid) == 3
        and min(sizes) >= 1
        and launch.shared_bytes >= 0
        and all(_is_argument(argument, buffer_bytes) for argument in launch.arguments)
    )


def _is_argument(argument: Sequence[int], buffer_bytes: Sequence[int]) -> bool:
    match argument:
        case (kind, int(buffer), int(offset)) if kind == POINTER:
            return 0 <= buffer < len(buffer_bytes) and 0 <= offset <= buffer_bytes[buffer]
        case (kind, int(value)) if kind == INT32:
            return -(2**31) <= value < 2**31
        case (kind, int(bits)) if kind == FLOAT32:
            return 0 <= bits < 2**32
        case (kind,):
            return kind == NULL
    return False
