"""Call plugins as TensorRT does: from C++, by the virtual functions of its interfaces.

A creator that Python gets from the registry is the Python object itself, and a call of its methods
never leaves Python. TensorRT calls the C++ interface, whose functions convert every argument and
result. Here ctypes makes the same calls. The positions of functions and the fields of structures
are those of the public headers (``NvInferRuntime.h``, ``NvInferPluginBase.h``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t
from ctypes import c_void_p as pointer
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

MAX_DIMS = 8
CHAR = 6  # nvinfer1::PluginFieldType::kCHAR
BUILD, RUNTIME = 0, 1  # nvinfer1::TensorRTPhase
DATA_TYPES = {"float32": 0, "int32": 3, "bfloat16": 7}  # nvinfer1::DataType
LINEAR = 0  # nvinfer1::TensorFormat::kLINEAR


class InterfaceInfo(Structure):
    """The kind and version of an interface."""

    _fields_ = [("kind", c_char_p), ("major", c_int32), ("minor", c_int32)]


class Field(Structure):
    """``PluginField``."""

    _fields_ = [("name", c_char_p), ("data", pointer), ("type", c_int32), ("length", c_int32)]


class Fields(Structure):
    """``PluginFieldCollection``."""

    _fields_ = [("count", c_int32), ("fields", POINTER(Field))]

    def by_name(self) -> dict[str, bytes]:
        """The bytes of each field."""
        return {
            field.name.decode(): ctypes.string_at(field.data, field.length)
            for field in self.fields[: self.count]
        }


class Dims(Structure):
    """``Dims``: 64-bit sizes."""

    _fields_ = [("rank", c_int32), ("sizes", c_int64 * MAX_DIMS)]


class TensorDesc(Structure):
    """``PluginTensorDesc``."""

    _fields_ = [("dims", Dims), ("type", c_int32), ("format", c_int32), ("scale", c_float)]


class DynamicTensorDesc(Structure):
    """``DynamicPluginTensorDesc``."""

    _fields_ = [("desc", TensorDesc), ("min", Dims), ("max", Dims), ("opt", Dims)]


class DimsExprs(Structure):
    """``DimsExprs``: a pointer to an expression for each axis."""

    _fields_ = [("rank", c_int32), ("sizes", pointer * MAX_DIMS)]


def dims(shape: Sequence[int]) -> Dims:
    """A shape."""
    return Dims(len(shape), (c_int64 * MAX_DIMS)(*shape))


def tensor_descs(tensors: Sequence[tuple[str, Sequence[int]]]) -> Any:
    """An array of descriptions of packed tensors, from element types and shapes."""
    described = [TensorDesc(dims(s), DATA_TYPES[dtype], LINEAR, 1.0) for dtype, s in tensors]
    return (TensorDesc * max(len(described), 1))(*described)


def dynamic_descs(tensors: Sequence[tuple[str, Sequence[int]]]) -> Any:
    """The same for a profile of one size."""
    described = [
        DynamicTensorDesc(desc, desc.dims, desc.dims, desc.dims) for desc in tensor_descs(tensors)
    ]
    return (DynamicTensorDesc * len(described))(*described)


@dataclass(frozen=True)
class Interface:
    """A C++ object with virtual functions."""

    address: int

    def call(self, slot: int, result: Any, *arguments: Any) -> Any:
        """Call the virtual function at a position of the table."""
        table = ctypes.cast(self.address, POINTER(POINTER(pointer))).contents
        kinds = [type(argument) for argument in arguments]
        function = ctypes.CFUNCTYPE(result, pointer, *kinds)(table[slot])
        return function(self.address, *arguments)

    @property
    def info(self) -> tuple[str, int, int]:
        """The interface's kind and version."""
        info = self.call(1, InterfaceInfo)
        return info.kind.decode(), info.major, info.minor

    def text(self, slot: int) -> str:
        """The result of a function that returns a string."""
        return bytes(self.call(slot, c_char_p)).decode()


# After the four functions of IVersionedInterface: language, information, two destructors.
_FIRST = 4
# In IPluginRegistry of TensorRT 11 and TensorRT-RTX 1.7. TensorRT 10 has more functions before it.
_GET_CREATOR = 10


class Creator(Interface):
    """``IPluginCreatorV3One``."""

    def create(self, node: str, fields: Mapping[str, bytes], phase: int) -> CalledPlugin | None:
        """The plugin of a node, or None where the creator failed."""
        array = (Field * max(len(fields), 1))()
        for place, (name, data) in zip(array, fields.items(), strict=False):
            place.name, place.type, place.length = name.encode(), CHAR, len(data)
            place.data = ctypes.cast(c_char_p(data), pointer).value
        collection = Fields(len(fields), array)
        arguments = (c_char_p(node.encode()), pointer(ctypes.addressof(collection)), c_int32(phase))
        address = self.call(_FIRST, pointer, *arguments)
        return CalledPlugin(address) if address else None

    @property
    def field_names(self) -> list[str]:
        """The names of the fields that it reads."""
        return [*self._fields(_FIRST + 1).by_name()]

    @property
    def identity(self) -> tuple[str, str, str]:
        """Name, version and namespace."""
        name, version, namespace = (self.text(_FIRST + slot) for slot in (2, 3, 4))
        return name, version, namespace

    def _fields(self, slot: int) -> Fields:
        return ctypes.cast(self.call(slot, pointer), POINTER(Fields)).contents


class CalledPlugin(Interface):
    """``IPluginV3`` with its three capabilities."""

    @cached_property
    def core(self) -> Interface:
        """``IPluginV3OneCore``."""
        return Interface(self.call(_FIRST, pointer, c_int32(0)))

    @cached_property
    def build(self) -> Interface:
        """``IPluginV3OneBuildV2``."""
        return Interface(self.call(_FIRST, pointer, c_int32(1)))

    @cached_property
    def runtime(self) -> Interface:
        """``IPluginV3OneRuntime``."""
        return Interface(self.call(_FIRST, pointer, c_int32(2)))

    @property
    def identity(self) -> tuple[str, str, str]:
        """Name, version and namespace."""
        name, version, namespace = (self.core.text(_FIRST + slot) for slot in (0, 1, 2))
        return name, version, namespace

    def clone(self) -> CalledPlugin:
        """A copy."""
        return CalledPlugin(self.call(_FIRST + 1, pointer))

    # Build.

    def configure(self, inputs: Any, outputs: Any) -> int:
        """The status of ``configurePlugin``."""
        return int(self.build.call(_FIRST, c_int32, *_array(inputs), *_array(outputs)))

    def output_types(self, inputs: Sequence[str], count: int) -> list[int]:
        """The element types of the outputs as numbers of ``DataType``."""
        types = (c_int32 * count)()
        given = (c_int32 * max(len(inputs), 1))(*(DATA_TYPES[dtype] for dtype in inputs))
        arguments = (*_array(types), pointer(ctypes.addressof(given)), c_int32(len(inputs)))
        assert self.build.call(_FIRST + 1, c_int32, *arguments) == 0
        return list(types)

    def output_shapes(
        self, inputs: Sequence[Sequence[int]], count: int
    ) -> list[tuple[int, ...]] | None:
        """The shapes that its expressions give for input shapes, or None where it failed."""
        expressions = Expressions()
        given = (DimsExprs * max(len(inputs), 1))(*map(expressions.dims, inputs))
        outputs = (DimsExprs * count)()
        arguments = (
            pointer(ctypes.addressof(given)), c_int32(len(inputs)), pointer(None), c_int32(0),
            *_array(outputs), pointer(expressions.builder),
        )  # fmt: skip
        if self.build.call(_FIRST + 2, c_int32, *arguments) != 0:
            return None
        return [expressions.shape(output) for output in outputs]

    def supports(self, position: int, tensors: Any, inputs: int) -> bool:
        """Whether a tensor's type and format are supported."""
        arguments = (
            c_int32(position), pointer(ctypes.addressof(tensors)),
            c_int32(inputs), c_int32(len(tensors) - inputs),
        )  # fmt: skip
        return bool(self.build.call(_FIRST + 3, ctypes.c_bool, *arguments))

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return int(self.build.call(_FIRST + 4, c_int32))

    def workspace_bytes(self, inputs: Any, outputs: Any) -> int:
        """The size of the scratch memory."""
        return int(self.build.call(_FIRST + 5, c_size_t, *_array(inputs), *_array(outputs)))

    def tactics(self) -> list[int]:
        """The tactics to time."""
        found = (c_int32 * max(int(self.build.call(_FIRST + 7, c_int32)), 1))()
        count = int(self.build.call(_FIRST + 7, c_int32))
        arguments = (pointer(ctypes.addressof(found)), c_int32(count))
        assert self.build.call(_FIRST + 6, c_int32, *arguments) == 0
        return list(found)[:count]

    @property
    def texts(self) -> tuple[str, str]:
        """The timing cache's name for it, and its description."""
        return self.build.text(_FIRST + 8), self.build.text(_FIRST + 10)

    @property
    def format_limit(self) -> int:
        """The number of formats to time."""
        return int(self.build.call(_FIRST + 9, c_int32))

    def aliased_input(self, output: int) -> int:
        """The input that an output is written over, or -1."""
        return int(self.build.call(_FIRST + 11, c_int32, c_int32(output)))

    # Runtime.

    def set_tactic(self, tactic: int) -> int:
        """The status of ``setTactic``."""
        return int(self.runtime.call(_FIRST, c_int32, c_int32(tactic)))

    def change_shapes(self, inputs: Any, outputs: Any) -> int:
        """The status of ``onShapeChange``."""
        return int(self.runtime.call(_FIRST + 1, c_int32, *_array(inputs), *_array(outputs)))

    def enqueue(
        self,
        descs: tuple[Any, Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> int:
        """The status of ``enqueue``."""
        addresses = [(pointer * max(len(part), 1))(*part) for part in (inputs, outputs)]
        places = (*descs, *addresses)
        arguments = [pointer(ctypes.addressof(place)) for place in places]
        return int(
            self.runtime.call(_FIRST + 2, c_int32, *arguments, pointer(workspace), pointer(stream))
        )

    def attach(self) -> CalledPlugin | None:
        """The plugin of an execution context that offers no resources."""
        address = self.runtime.call(_FIRST + 3, pointer, pointer(None))
        return CalledPlugin(address) if address else None

    def fields(self) -> dict[str, bytes]:
        """The fields that a plan stores."""
        address = self.runtime.call(_FIRST + 4, pointer)
        return ctypes.cast(address, POINTER(Fields)).contents.by_name()


def _array(array: Any) -> tuple[pointer, c_int32]:
    return pointer(ctypes.addressof(array)), c_int32(len(array))


class Expressions:
    """``IExprBuilder`` over constants: a builder's expressions, whose values are known."""

    _CONSTANT = ctypes.CFUNCTYPE(pointer, pointer, c_int64)
    _IS_CONSTANT = ctypes.CFUNCTYPE(ctypes.c_bool, pointer)
    _VALUE = ctypes.CFUNCTYPE(c_int64, pointer)

    def __init__(self) -> None:
        self._values: dict[int, int] = {}
        self._alive: list[Any] = []
        # The implementation's table begins with the two destructors.
        constant = self._CONSTANT(lambda _, value: self._expression(value))
        self._expression_table = self._table(
            self._IS_CONSTANT(lambda _: True), self._VALUE(lambda this: self._implementations[this])
        )
        self._implementations: dict[int, int] = {}
        self.builder = self._wrapped(self._table(constant))[0]

    def dims(self, shape: Sequence[int]) -> DimsExprs:
        """A shape as expressions."""
        return DimsExprs(len(shape), (pointer * MAX_DIMS)(*map(self._expression, shape)))

    def shape(self, exprs: DimsExprs) -> tuple[int, ...]:
        """The values of expressions that were made here."""
        return tuple(self._values[exprs.sizes[axis]] for axis in range(exprs.rank))

    def _expression(self, value: int) -> int:
        address, implementation = self._wrapped(self._expression_table)
        self._values[address] = self._implementations[implementation] = value
        return address

    def _table(self, *functions: Any) -> int:
        table = (pointer * (2 + len(functions)))()
        table[2:] = [ctypes.cast(function, pointer).value for function in functions]
        self._alive += [table, functions]
        return ctypes.addressof(table)

    def _wrapped(self, table: int) -> tuple[int, int]:
        """An object of the interface and its implementation: each begins with a table."""
        implementation = (pointer * 1)(table)
        wrapper = (pointer * 2)(self._table(), ctypes.addressof(implementation))
        self._alive += [implementation, wrapper]
        return ctypes.addressof(wrapper), ctypes.addressof(implementation)


class CppRegistry(Interface):
    """``IPluginRegistry`` of a library's process."""

    @classmethod
    def of(cls, library: Path) -> CppRegistry:
        """The registry that a shared library exports."""
        entry = ctypes.CDLL(str(library)).getPluginRegistry
        entry.restype = pointer
        return cls(entry())

    def creator(self, name: str, version: str, namespace: str) -> Creator | None:
        """A creator, or None where the registry has none of that name, version and namespace."""
        names = [c_char_p(text.encode()) for text in (name, version, namespace)]
        address = self.call(_GET_CREATOR, pointer, *names)
        return Creator(address) if address else None
