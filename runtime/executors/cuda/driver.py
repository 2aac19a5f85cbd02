"""The CUDA driver through cuda-bindings: one GPU's primary context, every return code checked."""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

import numpy as np

from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.gpu import GpuFacts, Handle, HostMemory, LaunchConfig
from specbuild.runtime.executors.cuda.shared_memory import shared_attributes

MIN_BINDINGS = 13


def open_gpu(ordinal: int = 0) -> DriverGpu:
    """Return a GPU of this machine.

    Raises UnsupportedHereError if cuda-bindings, the driver or the GPU is missing.
    """
    return DriverGpu(_initialised(), ordinal)


def gpu_count() -> int:
    """Return the number of GPUs that this process may use. Raises as :func:`open_gpu`."""
    driver = _initialised()
    status, count = driver.cuDeviceGetCount()
    return int(count) if status == driver.CUresult.CUDA_SUCCESS else 0


def _initialised() -> Any:
    """Return the initialized bindings of the driver."""
    driver = _bindings()
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # what cuda-bindings raises if libcuda cannot be loaded
        raise UnsupportedHereError(
            "no NVIDIA driver was found (libcuda cannot be loaded); install one, or run on a "
            "machine that has a GPU"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        name = _text(driver.cuGetErrorName(status))
        raise UnsupportedHereError(
            f"the NVIDIA driver finds no usable GPU ({name}); run on a machine that has one"
        )
    return driver


def _bindings() -> Any:
    try:
        version = importlib.metadata.version("cuda-bindings")
        from cuda.bindings import driver
    except ImportError as error:  # covers PackageNotFoundError
        raise UnsupportedHereError(
            "cuda-bindings is not installed; pip install '.[cuda]' where specbuild's sources are"
        ) from error
    if int(version.partition(".")[0]) < MIN_BINDINGS:
        raise UnsupportedHereError(
            f"cuda-bindings is {version}, {MIN_BINDINGS}.0 or later is needed; "
            "pip install --upgrade '.[cuda]' where specbuild's sources are"
        )
    return driver


class DriverGpu:
    """One GPU through its primary context."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        count = self._call("counting GPUs", driver.cuDeviceGetCount)
        if ordinal >= count:
            raise UnsupportedHereError(f"there are {count} GPUs, number {ordinal} is not one")
        self._device = self._call("opening the GPU", driver.cuDeviceGet, ordinal)
        self._context = self._call("opening the GPU", driver.cuDevicePrimaryCtxRetain, self._device)
        self.use()
        self._attribute = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        self._attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute.value.programmaticStreamSerializationAllowed = 1
        self._facts = self._describe()

    @property
    def facts(self) -> GpuFacts:
        """See :class:`Gpu`."""
        return self._facts

    def use(self) -> None:
        """Make the context current in the calling thread."""
        self._call("choosing the GPU", self._driver.cuCtxSetCurrent, self._context)

    def reaches(self, peer: DriverGpu) -> bool:
        """Return whether this GPU's kernels can access the memory of another GPU."""
        ask = self._driver.cuDeviceCanAccessPeer
        return bool(self._call("asking for peers", ask, self._device, peer.device))

    def reach(self, peer: DriverGpu) -> None:
        """Let this GPU's kernels access the memory of another one, by its addresses."""
        self.use()
        (status,) = self._driver.cuCtxEnablePeerAccess(peer.context, 0)
        if status != self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self._check("reaching another GPU's memory", status)

    @property
    def device(self) -> Any:
        """The driver's handle of the GPU."""
        return self._device

    @property
    def context(self) -> Any:
        """The driver's handle of the GPU's primary context."""
        return self._context

    def free_bytes(self) -> int:
        """Return the free device memory in bytes."""
        free, _ = self._call("asking for free memory", self._driver.cuMemGetInfo)
        return int(free)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory; return its address."""
        what = f"allocating {nbytes / 2**30:.2f} GiB of device memory"
        return int(self._call(what, self._driver.cuMemAlloc, nbytes))

    def release(self, address: int) -> None:
        """Release device memory."""
        self._call("releasing device memory", self._driver.cuMemFree, address)

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Allocate page-locked host memory, mapped for the device, with undefined contents."""
        driver, what = self._driver, f"locking {nbytes / 2**20:.1f} MiB of host memory"
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        address = int(self._call(what, driver.cuMemHostAlloc, nbytes, flags))
        device = int(self._call(what, driver.cuMemHostGetDevicePointer, address, 0))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return HostMemory(address, device, view)

    def release_host(self, memory: HostMemory) -> None:
        """Release page-locked memory."""
        self._call("releasing host memory", self._driver.cuMemFreeHost, memory.address)

    def new_stream(self) -> Handle:
        """Return a stream that does not wait for the legacy default stream."""
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._call("making a stream", self._driver.cuStreamCreate, flags)

    def fill(self, address: int, word: int, words: int, stream: Handle) -> None:
        """Set 32-bit words."""
        fill = self._driver.cuMemsetD32Async
        self._call("filling memory", fill, address, word & 0xFFFFFFFF, words, stream)

    def upload(self, address: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copy page-locked memory to the device."""
        upload = self._driver.cuMemcpyHtoDAsync
        self._call("copying to the GPU", upload, address, source, nbytes, stream)

    def download(self, target: int, address: int, nbytes: int, stream: Handle) -> None:
        """Copy device memory to page-locked memory."""
        download = self._driver.cuMemcpyDtoHAsync
        self._call("copying from the GPU", download, target, address, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        """Copy within the device."""
        copy = self._driver.cuMemcpyDtoDAsync
        self._call("copying on the GPU", copy, target, source, nbytes, stream)

    def synchronize(self, stream: Handle) -> None:
        """Wait until the stream is empty."""
        self._call("waiting for the GPU", self._driver.cuStreamSynchronize, stream)

    def new_event(self, *, timed: bool = False, sleeps: bool = False) -> Handle:
        """Return an event. A thread that waits for it polls, unless it ``sleeps``."""
        kinds = self._driver.CUevent_flags
        flags = int(kinds.CU_EVENT_DEFAULT if timed else kinds.CU_EVENT_DISABLE_TIMING)
        if sleeps:
            flags |= int(kinds.CU_EVENT_BLOCKING_SYNC)
        return self._call("making an event", self._driver.cuEventCreate, flags)

    def record(self, event: Handle, stream: Handle) -> None:
        """Record the event after the work queued so far."""
        self._call("recording an event", self._driver.cuEventRecord, event, stream)

    def wait(self, event: Handle) -> None:
        """Wait until the stream has passed the event."""
        self._call("waiting for the GPU", self._driver.cuEventSynchronize, event)

    def elapsed_s(self, first: Handle, last: Handle) -> float:
        """Return the seconds between two timed events that have passed."""
        milliseconds = self._call("timing", self._driver.cuEventElapsedTime, first, last)
        return float(milliseconds) / 1000

    def load_module(self, cubin: bytes, where: str) -> Handle:
        """Load a compiled file."""
        return self._call(f"loading {where}", self._driver.cuModuleLoadData, cubin)

    def function(self, module: Handle, entry: str) -> Handle:
        """Return an entry point of a module."""
        what, name = f"finding kernel {entry}", entry.encode()
        return self._call(what, self._driver.cuModuleGetFunction, module, name)

    def set_shared(self, function: Handle, shared_bytes: int, carveout: int) -> None:
        """Set the dynamic shared memory of launches, and the shared memory carveout."""
        what = f"asking for {shared_bytes} bytes of shared memory"
        for kind, value in shared_attributes(self._driver, shared_bytes, carveout):
            self._call(what, self._driver.cuFuncSetAttribute, function, kind, value)

    def launch(self, config: LaunchConfig, stream: Handle) -> None:
        """Queue a kernel; a ``programmatic`` one may start before the previous one is finished."""
        described = self._driver.CUlaunchConfig()
        described.gridDimX, described.gridDimY, described.gridDimZ = config.grid
        described.blockDimX, described.blockDimY, described.blockDimZ = config.block, 1, 1
        described.sharedMemBytes = config.shared_bytes
        described.hStream = stream
        if config.programmatic:
            described.attrs = [self._attribute]
            described.numAttrs = 1
        launch = self._driver.cuLaunchKernelEx
        self._call("launching a kernel", launch, described, config.function, config.parameters, 0)

    def begin_capture(self, stream: Handle) -> None:
        """Start to record launches on this stream."""
        modes = self._driver.CUstreamCaptureMode
        mode = modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("recording a graph", self._driver.cuStreamBeginCapture, stream, mode)

    def end_capture(self, stream: Handle) -> Handle:
        """Return the recorded launches, instantiated and uploaded."""
        driver, what = self._driver, "recording a graph"
        graph = self._call(what, driver.cuStreamEndCapture, stream)
        executable = self._call(what, driver.cuGraphInstantiate, graph, 0)
        self._call(what, driver.cuGraphDestroy, graph)
        self._call(what, driver.cuGraphUpload, executable, stream)
        return executable

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        """Queue a graph."""
        self._call("launching a graph", self._driver.cuGraphLaunch, graph, stream)

    def release_graph(self, graph: Handle) -> None:
        """Release a graph."""
        self._call("releasing a graph", self._driver.cuGraphExecDestroy, graph)

    def close(self) -> None:
        """Release the context, and with its last user everything in it."""
        self._call("closing the GPU", self._driver.cuDevicePrimaryCtxRelease, self._device)

    def _describe(self) -> GpuFacts:
        driver, what = self._driver, "describing the GPU"
        kinds = driver.CUdevice_attribute

        def attribute(kind: Any) -> int:
            return int(self._call(what, driver.cuDeviceGetAttribute, kind, self._device))

        _, total = self._call(what, driver.cuMemGetInfo)
        return GpuFacts(
            name=self._call(what, driver.cuDeviceGetName, 96, self._device)
            .partition(b"\0")[0]
            .decode(errors="replace"),
            capability=(
                attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors=attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            driver_version=int(self._call(what, driver.cuDriverGetVersion)),
            total_bytes=int(total),
        )

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        """Return a driver call's results without its status, which must be success."""
        status, *results = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            self._check(what, status)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, what: str, status: Any) -> None:
        results = self._driver.CUresult
        if status == results.CUDA_SUCCESS:
            return
        name = _text(self._driver.cuGetErrorName(status))
        reason = _text(self._driver.cuGetErrorString(status))
        if status == results.CUDA_ERROR_OUT_OF_MEMORY:
            raise UnsupportedHereError(
                f"{what} failed: the GPU has not enough free memory; close what else uses it, or "
                "build the engine with a smaller --max-seq-len or --max-batch-size"
            )
        unfit = (results.CUDA_ERROR_NO_BINARY_FOR_GPU, results.CUDA_ERROR_INVALID_IMAGE)
        if status in unfit:
            raise UnsupportedHereError(
                f"{what} failed ({name}): it was not compiled for this GPU; build the engine again "
                "for it"
            )
        raise SpecbuildError(
            f"{what} failed: {name} ({reason}); the GPU's state is lost, start the process again"
        )


def _text(result: tuple[Any, Any]) -> str:
    """Return the result of cuGetErrorName or cuGetErrorString."""
    text = result[1]
    return text.decode(errors="replace") if isinstance(text, bytes) else "unknown error"
