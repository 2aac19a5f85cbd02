"""Runs an engine's roles on a GPU: copies feeds, queues a role, and returns its outputs.

The pools stay on the device. A role is padded to one of its profiles. A profile of one size is
recorded as a CUDA graph after its first run, and replayed later, for each placement of its pools.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import Manifest, Port, Role
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle
from specbuild.runtime.executors.cuda.staging import Staging
from specbuild.runtime.executors.executor import ExecutorCapabilities
from specbuild.runtime.executors.tensorrt.feeds import (
    chosen_profile,
    device_type,
    fitted,
    from_device,
    padded,
    port_shape,
    profile_sizes,
    sizes_of,
    to_device,
    used,
)
from specbuild.runtime.executors.tensorrt.pools import OUT, POOL, Pools, pools_of, written_pools

_BLANK = "_blank"
_ALIGNMENT = 512


class RoleSession(Protocol):
    """The implementation of a role: an engine, or launches only."""

    def queue(
        self,
        profile: int,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        stream: Handle,
        *,
        scalars: Mapping[str, int],
    ) -> None:
        """Queue the role once, on a stream that runs or records.

        ``shapes`` are those of the inputs, ``addresses`` those of every tensor, ``scalars`` the
        values of the scalar inputs, by name.
        """
        ...

    def close(self) -> None:
        """Release its memory."""
        ...


OpenSession = Callable[[str], RoleSession]


class TensorRtExecutor:
    """One engine on one GPU. ``weights`` are the addresses of loaded tensors by name.

    ``release_weights`` is called at the end. Raises UnsupportedHereError if the caches or a role's
    tensors do not fit into memory.
    """

    def __init__(
        self,
        gpu: Gpu,
        manifest: Manifest,
        open_session: OpenSession,
        weights: Mapping[str, int],
        *,
        release_weights: Callable[[], None] = lambda: None,
        recorded: bool = True,
    ) -> None:
        self._gpu = gpu
        self._manifest = manifest
        self._open_session = open_session
        self._weights = weights
        self._recorded = recorded
        self._stream = gpu.new_stream()
        self._recording = gpu.new_stream()
        self._closing = contextlib.ExitStack()
        self._closing.callback(release_weights)
        self._staging = Staging(gpu, self._stream)
        self._closing.callback(self._staging.close)
        self._pools = Pools(self._zeros, in_place=facts_of(manifest.backend).pools_in_place)
        self._roles: dict[str, _LoadedRole] = {}
        # The last outputs of every role; if they are fed again, they are copied on the device.
        self._returned: dict[str, list[_Returned]] = {}

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """Plugins run kernels that are batch-invariant in decoding; TensorRT-RTX's own are not.

        The target's profiles state which rows are decoded: those of which all logits may be
        requested.
        """
        plugins = facts_of(self._manifest.backend).launches_kernels
        profiles = self._manifest.roles["target"].profiles
        return ExecutorCapabilities(
            self._manifest.backend,
            batch_invariant=plugins,
            device_step=False,
            fixed_pages=plugins,
            invariant_rows=max(p.axes["R"].most for p in profiles) if plugins else None,
        )

    @property
    def gpu_name(self) -> str:
        """The name of the GPU."""
        return self._gpu.facts.name

    def prepare(self, roles: Sequence[str]) -> None:
        """Load the engines of these roles."""
        self._gpu.use()
        for name in roles:
            if name not in self._roles:
                self._roles[name] = self._load(name)

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of a role. Raises SpecbuildError if no profile fits the feeds."""
        self.prepare([role])
        loaded = self._roles[role]
        description = loaded.role
        ports = [port for port in description.inputs if port.name in loaded.fed]
        sizes = sizes_of(ports, feeds)
        profile = chosen_profile(role, description, sizes)
        full = profile_sizes(description.profiles[profile], sizes)
        shapes = {port.name: port_shape(port, full) for port in description.inputs}
        for port in ports:
            self._feed(loaded, port, np.asarray(feeds[port.name]), shapes[port.name])
        scalars = {port.name: sizes[port.name] for port in ports if not port.shape}
        self._queue(loaded, _Launch(profile, shapes, scalars))
        return self._outputs(role, loaded, full, sizes)

    def close(self) -> None:
        """Release everything; the executor must not be used afterwards."""
        self._gpu.use()
        self._gpu.synchronize(self._stream)
        for loaded in self._roles.values():
            for graph in loaded.graphs.values():
                self._gpu.release_graph(graph)
            loaded.session.close()
        self._roles.clear()
        self._closing.close()
        self._gpu.close()

    def _load(self, name: str) -> _LoadedRole:
        role = self._manifest.roles[name]
        addresses = {name: self._weights[name] for name in role.tensors if name in self._weights}
        fed = []
        outputs = {port.name for port in role.outputs}
        for port in role.inputs:
            if port.name.endswith(POOL):
                self._pools.add(port.name, _nbytes(port, port_shape(port, {})))
                continue
            addresses[port.name] = self._allocate(role, port)
            written_over = port.name.removesuffix(_BLANK)
            if written_over != port.name and written_over in outputs:
                addresses[written_over] = addresses[port.name]
            else:
                fed.append(port.name)
        for port in role.outputs:
            if port.name not in addresses and not port.name.endswith(POOL + OUT):
                addresses[port.name] = self._allocate(role, port)
        return _LoadedRole(role, self._open_session(name), addresses, frozenset(fed))

    def _allocate(self, role: Role, port: Port) -> int:
        """Return memory for a port at its largest size."""
        max_sizes = [
            port_shape(port, {axis: pending.most for axis, pending in profile.axes.items()})
            for profile in role.profiles
        ]
        return self._zeros(
            max(_nbytes(port, shape) for shape in max_sizes), f"the tensor {port.name}"
        )

    def _zeros(self, nbytes: int, what: str) -> int:
        aligned = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        free = self._gpu.free_bytes()
        if aligned > free:
            raise UnsupportedHereError(
                f"{what} takes {aligned / 2**20:.0f} MiB of device memory, {free / 2**20:.0f} are "
                "free; build the engine with a smaller --max-seq-len or --max-batch-size"
            )
        address = self._gpu.allocate(aligned)
        self._closing.callback(self._gpu.release, address)
        self._gpu.fill(address, 0, aligned // 4, self._stream)
        return address

    def _feed(
        self, loaded: _LoadedRole, port: Port, array: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        address = loaded.addresses[port.name]
        for pending in (item for items in self._returned.values() for item in items):
            same = pending.array is array and pending.dtype == port.dtype
            if same and array.shape[1:] == shape[1:]:
                nbytes = array.size * device_type(port).itemsize
                self._gpu.copy(address, pending.address, nbytes, self._stream)
                return
        self._staging.upload(address, to_device(padded(fitted(array, port), port, shape), port))

    def _queue(self, loaded: _LoadedRole, launch: _Launch) -> None:
        profile = launch.profile
        fixed = all(a.least == a.most for a in loaded.role.profiles[profile].axes.values())
        addresses = {**loaded.addresses, **self._pools.addresses(loaded.pools)}
        recorded = (profile, self._pools.sides(loaded.pools))
        if recorded in loaded.graphs:
            self._gpu.launch_graph(loaded.graphs[recorded], self._stream)
        elif self._recorded and fixed and profile in loaded.ran:
            loaded.graphs[recorded] = self._record(loaded, launch, addresses)
            self._gpu.launch_graph(loaded.graphs[recorded], self._stream)
        else:
            loaded.queue(launch, addresses, self._stream)
            loaded.ran.add(profile)
        self._pools.written(loaded.written)

    def _record(self, loaded: _LoadedRole, launch: _Launch, addresses: Mapping[str, int]) -> Handle:
        self._gpu.begin_capture(self._recording)
        try:
            loaded.queue(launch, addresses, self._recording)
        except BaseException:
            # A stream that stays in recording would capture every later launch; the first error is
            # clearer.
            with contextlib.suppress(SpecbuildError):
                self._gpu.end_capture(self._recording)
            raise
        return self._gpu.end_capture(self._recording)

    def _outputs(
        self, role: str, loaded: _LoadedRole, full: Mapping[str, int], sizes: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        outputs: dict[str, np.ndarray] = {}
        returned: list[_Returned] = []
        for port in loaded.role.outputs:
            if port.name.endswith(POOL + OUT):
                continue
            shape = port_shape(port, full)
            # Full rows of the first axis: data after the requested ones is not read.
            rows = sizes.get(port.shape[0], shape[0]) if shape else 1
            shape = (rows, *shape[1:])
            address = loaded.addresses[port.name]
            data = self._staging.download(address, _nbytes(port, shape))
            array = from_device(data.view(device_type(port)).reshape(shape), port)
            output = outputs[port.name] = used(array, port, sizes)
            if output.shape[1:] == shape[1:]:
                output.setflags(write=False)
                returned.append(_Returned(output, port.dtype, address))
        if not outputs:
            self._gpu.synchronize(self._stream)
        self._returned[role] = returned
        return outputs


@dataclass(frozen=True)
class _Returned:
    """An output that host and device both have."""

    array: np.ndarray
    dtype: str
    address: int


@dataclass(frozen=True)
class _Launch:
    """One run of a role: its profile, the shapes of its inputs, the values of scalar ones."""

    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, int]


class _LoadedRole:
    """A role with its session, the places of its tensors besides pools, and its recorded graphs."""

    def __init__(
        self,
        role: Role,
        session: RoleSession,
        addresses: Mapping[str, int],
        fed: frozenset[str],
    ) -> None:
        self.role = role
        self.session = session
        self.addresses = addresses
        self.fed = fed
        self.pools = pools_of(port.name for port in role.inputs)
        self.written = written_pools(port.name for port in role.outputs)
        self.ran: set[int] = set()
        self.graphs: dict[tuple[int, tuple[int, ...]], Handle] = {}

    def queue(self, launch: _Launch, addresses: Mapping[str, int], stream: Handle) -> None:
        """Queue the role once, its tensors at these addresses."""
        self.session.queue(launch.profile, launch.shapes, addresses, stream, scalars=launch.scalars)


def _nbytes(port: Port, shape: Sequence[int]) -> int:
    return math.prod(shape) * device_type(port).itemsize
