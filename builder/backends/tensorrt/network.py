"""Builds a serialized engine from an ONNX graph, in the process of :mod:`build_engine`.

Weights are never copied here. The parser receives addresses in the memory-mapped file, and the
engine is streamed to its file.
"""

from __future__ import annotations

import importlib
import mmap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.backends.tensorrt.library import OFFERS, load, new_logger, new_monitor
from specbuild.builder.backends.tensorrt.memory_watch import MemoryWatch, anonymous_bytes
from specbuild.builder.backends.tensorrt.request import Binding, EngineRequest, EngineResult
from specbuild.builder.durable import replace_bytes
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.tensorrt.check import LIBRARIES


class EngineBuild:
    """One build. It owns the library's objects, created in the order of their dependencies."""

    def __init__(self, request: EngineRequest, advance: Callable[[float], None]) -> None:
        self._request = request
        self._errors: list[str] = []
        self._library = trt = load(request.backend)
        self._logger = new_logger(trt, self._errors.append)
        self._monitor = new_monitor(trt, advance)
        if request.prepare is not None:
            module, _, name = request.prepare.partition(":")
            getattr(importlib.import_module(module), name)(trt)
        self._builder = trt.Builder(self._logger)
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self._network = self._builder.create_network(flags)
        self._parser = trt.OnnxParser(self._network, self._logger)
        self._config = self._builder.create_builder_config()
        self._weights: mmap.mmap | None = None

    def run(self) -> EngineResult:
        """Parse, build and write. Raises SpecbuildError with the library's message."""
        started = time.monotonic()
        self._require_known_ops()
        self._parse()
        bindings = self._bindings()
        layers = Counter(
            str(self._network.get_layer(i).type).rpartition(".")[2].lower()
            for i in range(self._network.num_layers)
        )
        self._configure()
        parsed = anonymous_bytes()
        with MemoryWatch() as watch:
            size = self._write()
        self._save_timing_cache()
        return EngineResult(
            version=self._library.__version__,
            engine_bytes=size,
            layers=dict(sorted(layers.items())),
            bindings=bindings,
            profiles=self._config.num_optimization_profiles,
            seconds=time.monotonic() - started,
            peak_anonymous_bytes=watch.peak_bytes,
            parsed_anonymous_bytes=parsed,
            compute_capabilities=self._request.compute_capabilities or (_this_gpu(),),
        )

    def _require_known_ops(self) -> None:
        """Check every op before parsing: the parser terminates the process at an unknown node."""
        registry = self._builder.get_plugin_registry()
        # Plugins are registered in the registry of the process, the parent of the builder's.
        creators = {creator.name for creator in registry.all_creators_recursive}
        unknown = []
        for domain, name in self._request.ops:
            plugin = OFFERS[self._request.backend].plugins and name in creators
            if not plugin and (domain or not self._parser.supports_operator(name)):
                unknown.append(f"{domain}::{name}" if domain else name)
        if unknown:
            raise self._error(f"has no op or plugin {', '.join(sorted(unknown))}")

    def _parse(self) -> None:
        graph = Path(self._request.graph).read_bytes()
        if not self._parser.load_model_proto(graph, self._request.graph):
            raise self._error("cannot read the graph")
        for name, (address, size) in self._addresses().items():
            if not self._parser.load_initializer(name, address, size):
                raise self._error(f"rejects the tensor {name} of {size} bytes")
        if not self._parser.parse_model_proto():
            errors = [self._parser.get_error(i) for i in range(self._parser.num_errors)]
            raise self._error(
                f"rejects the graph: {errors[0].desc()}" if errors else "cannot parse the graph"
            )
        for i in range(self._network.num_layers):
            layer = self._network.get_layer(i)
            if layer.type == self._library.LayerType.ATTENTION_INPUT:
                # Shapes without a fused kernel need the decomposed form.
                layer.__class__ = self._library.IAttentionInputLayer
                layer.attention.decomposable = True

    def _addresses(self) -> dict[str, tuple[int, int]]:
        """Return the memory address and size in bytes of each tensor in the weights file."""
        if self._request.weights is None:
            return {}
        import json

        with Path(self._request.weights).open("rb") as file:
            self._weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._weights[:8], "little")
        header = json.loads(self._weights[8 : 8 + length])
        base = np.frombuffer(self._weights, np.uint8).ctypes.data + 8 + length
        return {
            name: (base + first, end - first)
            for name, entry in header.items()
            for first, end in [entry["data_offsets"]]
        }

    def _bindings(self) -> tuple[Binding, ...]:
        network = self._network
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        return tuple(
            Binding(tensor.name, str(tensor.dtype).rpartition(".")[2].lower(), tuple(tensor.shape),
                    is_input=is_input)
            for tensors, is_input in ((inputs, True), (outputs, False))
            for tensor in tensors
        )  # fmt: skip

    def _configure(self) -> None:
        trt, config, request = self._library, self._config, self._request
        config.progress_monitor = self._monitor
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        # TF32 would change results that need fp32, such as router logits and norms.
        config.clear_flag(trt.BuilderFlag.TF32)
        for enabled, flag in (
            (request.version_compatible, "VERSION_COMPATIBLE"),
            (request.weight_streaming, "WEIGHT_STREAMING"),
        ):
            if enabled:
                config.set_flag(getattr(trt.BuilderFlag, flag))
        if request.hardware_compatible:
            same = trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
            config.hardware_compatibility_level = same
        if request.aliased_plugins:
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        if request.compute_capabilities:
            config.num_compute_capabilities = len(request.compute_capabilities)
            for index, name in enumerate(request.compute_capabilities):
                capability = getattr(trt.ComputeCapability, name.replace("_", "").upper(), None)
                is_known = capability is not None
                if not is_known or not config.set_compute_capability(capability, index):
                    raise self._error(f"cannot build for {name}")
        network = self._network
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        scalars = {tensor.name for tensor in inputs if tensor.is_shape_tensor}
        for profile in request.profiles:
            shapes = self._builder.create_optimization_profile()
            for port in profile:
                set_range = shapes.set_shape_input if port.name in scalars else shapes.set_shape
                set_range(port.name, port.min_shape, port.opt_shape, port.max_shape)
            if config.add_optimization_profile(shapes) < 0:
                raise self._error("rejects an optimization profile")
        self._load_timing_cache()

    def _load_timing_cache(self) -> None:
        if self._request.timing_cache is None:
            return
        path = Path(self._request.timing_cache)
        stored = path.read_bytes() if path.exists() else b""
        cache = self._config.create_timing_cache(stored)
        if not self._config.set_timing_cache(cache, ignore_mismatch=False):
            raise SpecbuildError(
                f"--timing-cache {path} is from another GPU or TensorRT version; use another file"
            )

    def _save_timing_cache(self) -> None:
        if self._request.timing_cache is not None:
            cache = bytes(self._config.get_timing_cache().serialize())
            replace_bytes(Path(self._request.timing_cache), cache)

    def _write(self) -> int:
        trt = self._library

        class FileWriter(trt.IStreamWriter):  # type: ignore[misc, name-defined]
            def __init__(self, file: Any) -> None:
                trt.IStreamWriter.__init__(self)
                self.file = file
                self.failure: OSError | None = None

            def write(self, data: Any) -> int:
                try:
                    return int(self.file.write(data))
                except OSError as error:  # the library reports only a short write
                    self.failure = error
                    return 0

        path = Path(self._request.engine)
        with path.open("wb") as file:
            writer = FileWriter(file)
            is_built = self._builder.build_serialized_network_to_stream(
                self._network, self._config, writer
            )
        if writer.failure is not None:
            raise writer.failure
        size = path.stat().st_size
        if not is_built or size == 0:
            raise self._error("cannot build the engine")
        return size

    def _error(self, problem: str) -> SpecbuildError:
        title = LIBRARIES[self._request.backend].title
        detail = f" ({_short(self._errors[0])})" if self._errors else ""
        return SpecbuildError(
            f"building the role {self._request.role}: {title} {self._library.__version__} "
            f"{problem}{detail}"
        )


def _this_gpu() -> str:
    gpu = open_gpu()
    try:
        return "sm_{}{}".format(*gpu.facts.capability)
    finally:
        gpu.close()


def _short(message: str) -> str:
    """Return a message on one line of at most 300 characters."""
    line = " ".join(message.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
