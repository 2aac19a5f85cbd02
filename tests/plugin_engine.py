"""A TensorRT engine without TensorRT: the ops' references run its graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from emulated_cubins import emulated_cubins
from fused_graphs import run_graph

from specbuild.builder.backends.backend import MODEL_ROLES
from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, target_of
from specbuild.builder.backends.cuda.lowering import CUDA_PASSES
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.tensorrt.plugins import engine as plugin_engine
from specbuild.builder.backends.tensorrt.plugins.backend import TENSORRT
from specbuild.builder.backends.tensorrt.plugins.engine import PluginEngine, lower_roles
from specbuild.builder.backends.tensorrt.plugins.fields import PluginOp
from specbuild.builder.backends.tensorrt.request import Binding, EngineRequest, EngineResult
from specbuild.builder.graph.passes.pipeline import run_passes
from specbuild.builder.graphs import export_graphs
from specbuild.builder.inputs import read_checkpoints, settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.launches import Kernel
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Record
from specbuild.runtime.engine_dir.drafters.record import DRAFT_ROLES
from specbuild.runtime.engine_dir.manifest import Manifest, Port, StoredFile
from specbuild.runtime.executors.cuda.gpu import GpuFacts, HostMemory
from specbuild.runtime.executors.tensorrt.executor import TensorRtExecutor

_TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}


class NoCompiler:
    """Return a cubin of its own for every kernel, with the parameters that plugins pass."""

    def __init__(self, plugins: Sequence[PluginOp]) -> None:
        self._plugins = plugins

    @property
    def plugins(self) -> Sequence[PluginOp]:
        """Return the plugins whose launches define the parameters of kernels."""
        return self._plugins

    def compile(self, kernels: Any, _done: Callable[[], None]) -> Compiled:
        return emulated_cubins(kernels, self.plugins)


VERSION = "10.16.0.1"


def built_by_nobody(request: EngineRequest, _progress: Any) -> EngineResult:
    """Write the graph instead of TensorRT's engine."""
    graph = onnx.load(request.graph).graph
    Path(request.engine).write_bytes(Path(request.graph).read_bytes())
    bindings = [Binding(v.name, "", (), is_input=True) for v in graph.input]
    bindings += [Binding(v.name, "", (), is_input=False) for v in graph.output]
    return EngineResult(VERSION, 1, {"plugin_v3": len(graph.node)}, tuple(bindings),
                        len(request.profiles), 0.0, 0, 0, ("sm_90",))  # fmt: skip


@dataclass(frozen=True)
class Built:
    """The manifest of a plugin engine, and its graphs: fused models and portable roles."""

    models: dict[str, ir.Model]
    manifest: Manifest


@dataclass(frozen=True)
class BuiltPlugins(Built):
    """A built engine with its plugins, and the kernels that the cubins replace."""

    engine: PluginEngine
    kernels: tuple[Kernel, ...]


def build_plugins(model: Path, draft: Path | None, **options: Any) -> BuiltPlugins:
    """Lower a checkpoint; compile no kernel."""
    asked = BuildOptions.from_flat(
        model=model, draft=draft, output=Path("unused"), backend="tensorrt", **options
    )
    silent = SilentProgress()
    inputs = settled_inputs(asked, TENSORRT, read_checkpoints(asked, silent))
    sources, engine_sizes = inputs.sources, inputs.engine_sizes
    models = export_graphs(sources, engine_sizes, silent)
    for role in MODEL_ROLES:
        if role in models:
            run_passes(role, models[role], CUDA_PASSES, None)
    lowered = lower_roles(models, engine_sizes, CallLowering(target_of("sm_90a")))
    engine = plugin_engine.compile_roles(models, lowered, NoCompiler(lowered.plugins), "sm_90a")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        specbuild_version="0",
        backend="tensorrt",
        device="sm_90a",
        target=sources.target_geometry,
        drafters=()
        if sources.draft_geometry is None
        else (
            Eagle3Record(cache_group="draft", roles=DRAFT_ROLES, geometry=sources.draft_geometry),
        ),
        limits=engine.engine_sizes.limits,
        draft_default=engine.engine_sizes.draft_default,
        cache_groups=engine.engine_sizes.groups,
        roles=engine.roles,
        tensors={},
        options={},
        warnings=(),
        files={name: StoredFile(len(data), "0" * 32) for name, data in engine.files.items()},
    )
    return BuiltPlugins(models, manifest, engine, tuple(lowered.kernels))


@dataclass
class Stream:
    """Runs operations at once, or records them."""

    recording: list[Callable[[], None]] | None = None


HOST = GpuFacts("Host", (9, 0), 132, 13000, 1 << 40)


@dataclass
class HostGpu:
    """A GPU without kernels, with memory of the host that is initially poisoned."""

    facts: GpuFacts = HOST
    held: dict[int, np.ndarray] = field(default_factory=dict)
    graphs: int = 0
    closed: bool = False

    def do(self, stream: Stream, operation: Callable[[], None]) -> None:
        """Run or record an operation."""
        if stream.recording is None:
            operation()
        else:
            stream.recording.append(operation)

    def use(self) -> None:
        assert not self.closed

    def free_bytes(self) -> int:
        return self.facts.total_bytes - sum(map(len, self.held.values()))

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes, 0xFF, np.uint8)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def release(self, address: int) -> None:
        del self.held[address]

    def allocate_host(self, nbytes: int) -> HostMemory:
        address = self.allocate(nbytes)
        return HostMemory(address, address, self.held[address])

    def release_host(self, memory: HostMemory) -> None:
        self.release(memory.address)

    def new_stream(self) -> Stream:
        return Stream()

    def fill(self, address: int, word: int, words: int, stream: Stream) -> None:
        place = (ctypes.c_uint32 * words).from_address(address)
        self.do(stream, lambda: np.ctypeslib.as_array(place).fill(word))

    def upload(self, address: int, source: int, nbytes: int, stream: Stream) -> None:
        self.do(stream, lambda: ctypes.memmove(address, source, nbytes) and None)

    download = copy = upload

    def synchronize(self, stream: Stream) -> None:
        assert stream.recording is None

    def begin_capture(self, stream: Stream) -> None:
        assert stream.recording is None
        stream.recording = []

    def end_capture(self, stream: Stream) -> list[Callable[[], None]]:
        graph, stream.recording = stream.recording, None
        assert graph is not None
        return graph

    def launch_graph(self, graph: list[Callable[[], None]], stream: Stream) -> None:
        self.graphs += 1
        for operation in graph:
            self.do(stream, operation)

    def release_graph(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def close(self) -> None:
        self.closed = True


class GraphSession:
    """Replaces a deserialized engine: every node of the role runs its op's reference."""

    def __init__(self, gpu: HostGpu, role: str, built: Built) -> None:
        self._gpu = gpu
        self._model = built.models[role]
        self._role = built.manifest.roles[role]
        self.queued = 0

    def queue(
        self,
        profile: int,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        scalars: Mapping[str, int],
    ) -> None:
        self.queued += 1
        assert all(self._role.profiles[profile].axes[n].most == v for n, v in scalars.items())
        held = self._role.profiles[profile].axes
        sizes = {axis: size.most for axis, size in held.items()}
        inputs = {port.name: port for port in self._role.inputs}
        for name, port in inputs.items():
            exact = tuple(sizes[s] if isinstance(s, str) else s for s in port.shape)
            assert shapes[name] == exact, (name, shapes[name], exact)
        self._gpu.do(stream, lambda: self._run(shapes, addresses))

    def close(self) -> None:
        self.queued = 0

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        feeds = {
            port.name: _view(port, shapes[port.name], addresses[port.name])
            for port in self._role.inputs
        }
        results = run_graph(self._model, feeds)
        for port in self._role.outputs:
            value = results[port.name]
            _view(port, tuple(value.shape), addresses[port.name]).copy_(value)


def _view(port: Port, shape: tuple[int, ...], address: int) -> torch.Tensor:
    dtype = _TORCH[port.dtype]
    nbytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


class ApartSession(GraphSession):
    """A session that overwrites its outputs before it reads its inputs.

    An engine may do this, unless the manifest states that an output shares an input's memory.
    """

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        for port in self._role.outputs:
            if port.name.endswith("_pool.out"):
                _view(port, port.shape, addresses[port.name]).fill_(torch.nan)
        super()._run(shapes, addresses)


def executor_of(
    built: Built, *, recorded: bool = True, session: type[GraphSession] = GraphSession
) -> tuple[TensorRtExecutor, HostGpu, dict[str, GraphSession]]:
    """Return an executor whose sessions run the graphs."""
    gpu = HostGpu()
    sessions: dict[str, GraphSession] = {}

    def open_session(role: str) -> GraphSession:
        sessions[role] = session(gpu, role, built)
        return sessions[role]

    executor = TensorRtExecutor(gpu, built.manifest, open_session, {}, recorded=recorded)
    return executor, gpu, sessions
