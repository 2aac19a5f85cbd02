"""Stands for TensorRT on a GPU: the plugin nodes of a graph are queued one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from example_engine import build_example
from plugin_engine import built_by_nobody

from specbuild.builder.backends.tensorrt import capabilities, plugin_plans
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_file import read_file
from specbuild.runtime.executors.cuda.driver import DriverGpu
from specbuild.runtime.executors.tensorrt import loading
from specbuild.runtime.executors.tensorrt.executor import RoleSession
from specbuild.runtime.executors.tensorrt.launched_role import read_launched_role
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    ITEM_BYTES,
    read_fields,
)
from specbuild.runtime.executors.tensorrt.sessions import LaunchedSession
from specbuild.runtime.manifest import Manifest


class WalkedGraph:
    """A plugin graph; tensors between nodes have memory of their own, poisoned at first."""

    def __init__(self, gpu: DriverGpu, graph: bytes) -> None:
        self._gpu = gpu
        held = onnx.load_model_from_string(graph).graph
        known: dict[tuple[bytes, ...], OpLauncher] = {}
        self._nodes = []
        stream = gpu.new_stream()
        self._between: dict[str, int] = {}
        ports = {value.name for value in (*held.input, *held.output)}
        for node in held.node:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            key = (attributes[DESCRIPTION], attributes[CUBINS])
            if key not in known:
                record, cubins = read_fields({n: attributes[n] for n in (DESCRIPTION, CUBINS)})
                known[key] = OpLauncher(gpu, record, cubins)
            launcher = known[key]
            for index, (name, output) in enumerate(
                zip(node.output, launcher.record.outputs, strict=True)
            ):
                shapes = [bucket.outputs[index] for bucket in launcher.record.buckets]
                nbytes = max(map(math.prod, shapes)) * ITEM_BYTES[output.dtype]
                if name not in ports and output.alias is None:
                    words = -(-nbytes // 4)
                    self._between[name] = gpu.allocate(4 * words)
                    gpu.fill(self._between[name], 0xFFFFFFFF, words, stream)
            self._nodes.append((launcher, list(node.input), list(node.output)))
        most = max(launcher.record.workspace_bytes for launcher, _, _ in self._nodes)
        self._workspace = gpu.allocate(max(most, 512))
        gpu.synchronize(stream)

    def queue(
        self, profile: int, _shapes: object, addresses: Mapping[str, int], stream: Any
    ) -> None:
        places = {**self._between, **addresses}
        for launcher, inputs, outputs in self._nodes:
            for name, output in zip(outputs, launcher.record.outputs, strict=True):
                if output.alias is not None:
                    source = places[inputs[output.alias]]
                    assert places.setdefault(name, source) == source, name
            tensors = [places[name] for name in (*inputs, *outputs)]
            launcher.enqueue(profile, tensors, self._workspace, stream)

    def close(self) -> None:
        for address in (*self._between.values(), self._workspace):
            self._gpu.release(address)


def build_walked(output: Path) -> None:
    """The example as an engine whose plans are the graphs themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "require_library", lambda _: None)
        patch.setattr(plugin_plans, "build_engine", built_by_nobody)
        build_example(output, "tensorrt")


def load_walked(directory: Path) -> Engine:
    """The engine with walked graphs in TensorRT's place; all else is the runtime's own."""

    def opener(
        _library: object, gpu: DriverGpu, _directory: Path, manifest: Manifest
    ) -> Callable[[str], RoleSession]:
        def open_session(name: str) -> RoleSession:
            role = manifest.roles[name]
            data = bytes(read_file(directory, manifest, role.file))
            if role.file.endswith(".engine"):
                return WalkedGraph(gpu, data)
            return LaunchedSession(gpu, read_launched_role(data, name, len(role.profiles)))

        return open_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "reasons_against", lambda *_: [])
        patch.setattr(loading, "load", lambda _: None)
        patch.setattr(loading, "register_creators", lambda *_: None)
        patch.setattr(loading, "session_opener", opener)
        return Engine.load(directory)
