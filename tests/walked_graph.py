"""Replaces TensorRT: queues the plugin nodes of a graph one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx

from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    read_fields,
)


class WalkedGraph:
    """A plugin graph. Tensors between nodes have their own memory, initially poisoned."""

    def __init__(self, gpu: Gpu, graph: bytes) -> None:
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
        self,
        profile: int,
        _shapes: object,
        addresses: Mapping[str, int],
        stream: Any,
        *,
        scalars: object,
    ) -> None:
        del scalars
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
