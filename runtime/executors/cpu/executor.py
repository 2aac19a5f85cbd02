"""Runs an engine's graphs with ONNX Runtime on the CPU."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from specbuild.runtime.cache.state_snapshots import HostStateCopies
from specbuild.runtime.engine_dir.manifest import Limits, Manifest, Port, Role, StateGroup
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, UnsupportedHereError
from specbuild.runtime.executors.cpu.row_padding import (
    PROBE_FILE,
    Padding,
    RowPadder,
    unpadded,
)
from specbuild.runtime.executors.executor import ExecutorCapabilities

# Ports of caches: keys, values, latents, block summaries, recurrent states.
_STATE_SUFFIXES = (".tail_pool", ".state_pool")
_POOL_SUFFIXES = (".k_pool", ".v_pool", ".c_pool", ".summary_pool", *_STATE_SUFFIXES)
_OUT = ".out"
# Element types as the manifest spells them.
_ELEMENTS: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
}


class CpuExecutor:
    """One session per role, created on its first run; sessions share pools in place.

    ``graphs`` has the checked bytes of every role's file. ``weights`` are the memory-mapped
    tensors, which all sessions share as external initializers. Launches of the target get the rows
    that ``padding`` adds.
    """

    def __init__(
        self,
        manifest: Manifest,
        graphs: Mapping[str, bytes],
        weights: Mapping[str, np.ndarray],
        *,
        threads: int = 1,
        padding: Padding | None = None,
    ) -> None:
        self._manifest = manifest
        self._graphs = graphs
        self._weights = weights
        self._threads = threads
        self._padder = None
        if padding is not None and padding is not unpadded:
            self._padder = RowPadder(manifest.roles["target"], padding)
        self.pools: dict[str, Any] = {}
        self._sessions: dict[str, _RoleSession] = {}

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """ONNX Runtime's kernels differ by 1e-6 with the number of rows."""
        return ExecutorCapabilities("cpu", batch_invariant=False, device_step=False)

    @property
    def loaded_roles(self) -> tuple[str, ...]:
        """The roles whose sessions exist."""
        return tuple(self._sessions)

    def close(self) -> None:
        """Release the sessions, their prepacked weights, and the pools."""
        self._sessions.clear()
        self.pools.clear()

    def prepare(self, roles: Sequence[str]) -> None:
        """Create the sessions of these roles."""
        for role in roles:
            if role not in self._sessions:
                self._sessions[role] = self._load(role)

    def state_pools(self, group: str) -> dict[str, np.ndarray]:
        """Return views of the pools of a state group, by name, after a launch has used them."""
        return {
            name: pool.numpy()
            for name, pool in self.pools.items()
            if name.startswith(f"{group}.") and name.endswith(_STATE_SUFFIXES)
        }

    def state_copies(
        self,
        group: StateGroup,
        limits: Limits,  # noqa: ARG002 - of SavesStates
        *,
        capacity: int,  # noqa: ARG002
    ) -> HostStateCopies:
        """See :class:`SavesStates`."""
        return HostStateCopies(partial(self.state_pools, group.name))

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of a role; they are valid until its next run, and may be fed to it."""
        session = self._sessions.get(role)
        if session is None:
            session = self._sessions[role] = self._load(role)
        if self._padder is None or role != "target":
            return session.run(feeds)
        padded, counts = self._padder.padded(feeds)
        return self._padder.cut(session.run(padded), counts)

    def _load(self, name: str) -> _RoleSession:
        import onnxruntime as ort

        role = self._manifest.roles[name]
        options = session_options(self._threads)
        values = [ort.OrtValue.ortvalue_from_numpy(self._weights[t]) for t in role.tensors]
        if values:
            options.add_external_initializers(list(role.tensors), values)
        graph = self._graphs[role.file]
        try:
            # With its fallback the library prints on standard output, and repeats the attempt.
            session = ort.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # the library's exceptions have no common base of their own
            raise _library_error(role, "refuses it", error) from error
        pools = {
            port.name: self._pool(port)
            for port in role.inputs
            if port.name.endswith(_POOL_SUFFIXES)
        }
        return _RoleSession(session, role, pools)

    def _pool(self, port: Port) -> Any:
        """Return the pool of an input ``{group}.{layer}.{part}_pool``, allocated once."""
        name = port.name
        if name not in self.pools:
            import onnxruntime as ort

            self.pools[name] = ort.OrtValue.ortvalue_from_numpy(
                allocate_pool(name.partition(".")[0], port.dtype, port.shape)
            )
        return self.pools[name]


def session_options(threads: int) -> Any:
    """Return the options of every session: prepacked weights, no spinning idle threads.

    A memory pattern is stored for every shape of launch (about 10 KB each). It saves a tenth of a
    one-row step, which otherwise makes a thousand small allocations.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = True
    options.log_severity_level = 3
    # Otherwise the library looks for its own format in the bytes, which is not checked here.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("session.disable_prepacking", "0")
    if threads > 1:
        # Each session has its own threads: those of an idle session must not occupy the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def run_probe(graph: bytes, threads: int) -> Callable[[np.ndarray], Sequence[np.ndarray]]:
    """Return a function that runs an engine's ``row_probe.onnx``."""
    import onnxruntime as ort

    def failed(error: Exception) -> EngineFileError:
        line = " ".join(str(error).split())[:300]
        return OutdatedEngineError(
            f"{PROBE_FILE}: ONNX Runtime {ort.__version__} refuses it ({line})"
        )

    try:
        session = ort.InferenceSession(
            graph, session_options(threads), providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # the library's exceptions have no common base of their own
        raise failed(error) from error

    def run(x: np.ndarray) -> Sequence[np.ndarray]:
        try:
            products: Sequence[np.ndarray] = session.run(None, {"x": x})
        except Exception as error:  # see above
            raise failed(error) from error
        return products

    return run


class _RoleSession:
    """A session with permanently bound pools; a call binds only what changed."""

    def __init__(self, session: Any, role: Role, pools: Mapping[str, Any]) -> None:
        self._session = session
        self._role = role
        self._binding = session.io_binding()
        # The wrapper's own methods look up the device for every output, which takes longer than the
        # binding, so the native object is used.
        self._native = self._binding._iobinding
        self._cpu = _cpu_device()
        self._inputs = {
            port.name: _element(port.dtype, port.name)
            for port in role.inputs
            if port.name not in pools
        }
        for name, pool in pools.items():
            self._binding.bind_ortvalue_input(name, pool)
        self._outputs = []
        for port in role.outputs:
            source = port.name.removesuffix(_OUT)
            if port.name.endswith(_OUT) and source in pools:
                self._binding.bind_ortvalue_output(port.name, pools[source])
            else:
                self._outputs.append(port.name)
        self._ranks = {port.name: len(port.shape) for port in role.outputs}
        # Outputs are returned in the order of their binding: the pools first.
        self._first_output = len(role.outputs) - len(self._outputs)
        self._bound: dict[str, np.ndarray] = {}
        self._alive: Any = None

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        native, bound = self._native, self._bound
        for name, dtype in self._inputs.items():
            array = feeds[name]
            # A binding keeps the array's memory alive, so the same array need not be bound again.
            if bound.get(name) is array:
                continue
            if array.dtype != dtype or not array.flags.c_contiguous:
                array = np.ascontiguousarray(array, dtype)
            native.bind_input(name, array)
            bound[name] = array
        for name in self._outputs:
            native.bind_output(name, self._cpu)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # see above
            raise _library_error(self._role, "fails to run it", error) from error
        values = native.get_outputs()
        self._alive = values
        first = self._first_output
        arrays = {name: values[first + i].numpy() for i, name in enumerate(self._outputs)}
        for name, array in arrays.items():
            if array.ndim != self._ranks[name]:
                raise OutdatedEngineError(
                    f"{self._role.file}: output {name} has {array.ndim} axes, the manifest says "
                    f"{self._ranks[name]}"
                )
        return arrays


def _library_error(role: Role, what: str, error: Exception) -> Exception:
    """Return ONNX Runtime's error as a sentence; out-of-memory is not a fault of the engine."""
    import onnxruntime as ort

    if isinstance(error, MemoryError):
        return error
    line = " ".join(str(error).split())[:300] or type(error).__name__
    return EngineFileError(
        f"{role.file}: ONNX Runtime {ort.__version__} {what} ({line}); rebuild the engine, or "
        "install the version that it was built with"
    )


def _cpu_device() -> Any:
    import onnxruntime as ort

    return ort.OrtDevice.make("cpu", 0)._get_c_device()


def allocate_pool(group: str, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return zeros, because padding reads page 0, whose values must be finite.

    NumPy requests huge pages for large arrays. The first token of a short prompt then waits until
    the kernel has cleared 2 MB in each head of each layer's pool, so pools are mapped directly.
    """
    element = _element(dtype, f"cache group {group}")
    try:
        memory = mmap.mmap(
            -1, math.prod(shape) * element.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, element).reshape(shape)
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise UnsupportedHereError(
            f"the caches of group {group} do not fit into memory; build the engine with a "
            "smaller --max-seq-len or --max-batch-size"
        ) from error


def _element(name: str, where: str) -> np.dtype[Any]:
    if name not in _ELEMENTS:
        raise OutdatedEngineError(
            f"{where} has element type {name!r}, a CPU engine has {', '.join(_ELEMENTS)}"
        )
    return _ELEMENTS[name]
