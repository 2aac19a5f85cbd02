"""A stand-in for TensorRT and TensorRT-RTX on machines without them: its engines are records.

Its engine has the graph, the weights' digests, the profiles and all settings that the real library
would receive, in a deterministic order. (TensorRT-RTX's own engines differ from build to build.) It
cannot run. ``benchmarks/build_engines.py`` makes this file importable as ``tensorrt`` and as
``tensorrt_rtx``; it has only what a build calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

__version__ = {"tensorrt": "10.16.0.1", "tensorrt_rtx": "1.7.1.116"}.get(__name__, "0.0.0.0")

_RTX_TAG, _RTX_GPUS = b"vtrt", ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")


class _Member(int):
    """A member of an enumeration: its value is 0 and it knows its name."""

    name: str

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


class _Names(type):
    """A class of the library, as a base and as an enumeration with every member."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Member(0)
        member.name = f"{cls.__name__}.{name}"
        return member


class _Base(metaclass=_Names):
    def __init__(self, *_: Any) -> None:
        """Accept the arguments of the library's class."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return globals().setdefault(name, _Names(name, (_Base,), {}))


class _Calls:
    """An object of the library that records its settings."""

    num_optimization_profiles = 0

    def __init__(self) -> None:
        self.__dict__["said"] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "progress_monitor":
            return
        self.said.append([name, _plain(value)])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.said.append([name, *map(_plain, arguments)])
            if name == "add_optimization_profile":
                self.__dict__["num_optimization_profiles"] = self.num_optimization_profiles + 1
            return True

        return call


def _plain(value: Any) -> Any:
    if isinstance(value, _Calls):
        return value.said
    return value if type(value) in (bool, int) else str(value)


class _Registry:
    def __init__(self) -> None:
        self.all_creators_recursive: list[Any] = []

    def register_creator(self, creator: Any, _namespace: str) -> bool:
        self.all_creators_recursive.append(creator)
        return True


_registry = _Registry()


def get_plugin_registry() -> Any:
    """Return the registry of this process."""
    return _registry


class _Network:
    num_layers = num_inputs = num_outputs = 0

    def __init__(self) -> None:
        self.weights: dict[str, str] = {}

    def parse(self, graph: bytes) -> None:
        import onnx

        self.model = onnx.load_model_from_string(graph)
        self.inputs, self.outputs = (
            [_port(value) for value in values]
            for values in (self.model.graph.input, self.model.graph.output)
        )
        self.num_inputs, self.num_outputs = len(self.inputs), len(self.outputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


def _port(value: Any) -> Any:
    tensor = value.type.tensor_type
    shape = tuple(-1 if size.dim_param else size.dim_value for size in tensor.shape.dim)
    dtype = f"DataType.{tensor.elem_type}"
    return SimpleNamespace(name=value.name, dtype=dtype, shape=shape, is_shape_tensor=False)


class OnnxParser:
    """Reads a graph; supports every op."""

    num_errors = 0

    def __init__(self, network: _Network, _logger: Any) -> None:
        self._network = network

    def supports_operator(self, _name: str) -> bool:
        """Return True for every op."""
        return True

    def load_model_proto(self, graph: bytes, _path: str) -> bool:
        """Read the graph."""
        self._network.parse(graph)
        return True

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        """Add a weight."""
        data = ctypes.string_at(address, size)
        self._network.weights[name] = hashlib.sha256(data).hexdigest()
        return True

    def parse_model_proto(self) -> bool:
        """Return True."""
        return True


class Builder:
    """Records its input."""

    def __init__(self, _logger: Any) -> None:
        if __name__ == "tensorrt":
            _pretend_gpu()

    def get_plugin_registry(self) -> Any:
        """Return the registry of the process."""
        return _registry

    def create_network(self, _flags: int) -> _Network:
        """Return an empty network."""
        return _Network()

    def create_builder_config(self) -> _Calls:
        """Return empty settings."""
        return _Calls()

    def create_optimization_profile(self) -> _Calls:
        """Return empty settings."""
        return _Calls()

    def build_serialized_network_to_stream(
        self, network: _Network, config: _Calls, writer: Any
    ) -> bool:
        """Return the record: a line of JSON after 64 bytes, as a TensorRT-RTX engine begins.

        The nodes' texts are separate from the graph, so that a reader finds them.
        """
        nodes = []
        for node in network.model.graph.node:
            texts = {a.name: a.s.decode() for a in node.attribute if a.s.isascii() and a.s}
            selected = [a for a in node.attribute if a.name not in texts]
            nodes.append({"name": node.name, "op": node.op_type, "attributes": texts})
            del node.attribute[:]
            node.attribute.extend(selected)
        graph = network.model.SerializeToString(deterministic=True)
        record = {
            "graph": hashlib.sha256(graph).hexdigest(),
            "nodes": nodes,
            "weights": network.weights,
            "settings": config.said,
        }
        body = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        writer.write(_header(config.said, len(body)) + body)
        return True


def _header(settings: list[Any], body_bytes: int) -> bytes:
    mask = 0
    for call, *arguments in settings:
        if call == "set_compute_capability":
            mask |= 1 << _RTX_GPUS.index(str(arguments[0]).rpartition(".")[2])
    version = bytes(int(part) for part in __version__.split("."))
    head = _RTX_TAG + bytes(12) + (64 + body_bytes).to_bytes(8, "little") + version
    return (head + _RTX_TAG + mask.to_bytes(4, "little")).ljust(64, b"\0")


def _pretend_gpu() -> None:
    """Replace the driver's GPU query of a build: it reports an H200."""
    driver = MagicMock(name="cuda.bindings.driver")
    driver.CUresult.CUDA_SUCCESS = 0
    kinds = driver.CUdevice_attribute
    answers = {
        id(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR): 9,
        id(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR): 0,
    }
    for name in ("cuInit", "cuCtxSetCurrent", "cuDevicePrimaryCtxRelease"):
        getattr(driver, name).return_value = (0,)
    for name in ("cuDeviceGet", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain"):
        getattr(driver, name).return_value = (0, int(name == "cuDeviceGetCount"))
    driver.cuDriverGetVersion.return_value = (0, 13000)
    driver.cuMemGetInfo.return_value = (0, 1 << 37, 1 << 37)
    driver.cuDeviceGetName.return_value = (0, b"stand-in")
    driver.cuDeviceGetAttribute.side_effect = lambda kind, _: (0, answers.get(id(kind), 132))
    sys.modules["cuda.bindings.driver"] = driver
    import cuda.bindings

    cuda.bindings.driver = driver
