"""Where a plan's buffers lie: one arena on the device, and the ring in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.engine_dir.plan import Buffer, Plan, Port
from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle

# Bulk copies want 128 bytes; cuMemAlloc itself gives no less than 512.
ALIGNMENT = 512
# Code, graphs and the driver's own bookkeeping, which no plan knows.
RESERVE_BYTES = 256 << 20
STAGING_BYTES = 8 << 20
_ITEMS: Mapping[str, np.dtype[np.generic]] = {
    "int32": np.dtype(np.int32),
    "float32": np.dtype(np.float32),
    # numpy has no bf16: its bit patterns
    "bfloat16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}


@dataclass(frozen=True)
class Footprint:
    """Device memory of a rank that a plan takes: its buffers by space, padding included."""

    weights: int
    cache: int
    state: int
    arena: int
    exchange: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.state + self.arena + self.exchange


def footprint(plan: Plan) -> Footprint:
    """What the plan's buffers take; nothing is allocated."""
    sizes = {space: 0 for space in ("weights", "cache", "state", "ring", "arena", "exchange")}
    for buffer in plan.buffers:
        sizes[buffer.space] += _padded(buffer.bytes)
    sizes.pop("ring")
    return Footprint(**sizes)


def lack_of_memory(plan: Plan, free_bytes: int) -> str | None:
    """Why the plan does not fit into what is free; None where it does."""
    wanted = footprint(plan)
    needed = wanted.total + RESERVE_BYTES
    if needed <= free_bytes:
        return None
    gib = 2**30
    return (
        f"weights {wanted.weights / gib:.2f}, caches {wanted.cache / gib:.2f}, the rest "
        f"{(needed - wanted.weights - wanted.cache) / gib:.2f}: {needed / gib:.2f} GiB of device "
        f"memory are needed, {free_bytes / gib:.2f} GiB are free; close what else uses the GPU, "
        "or build the engine with a smaller --max-seq-len or --max-batch-size"
    )


class DeviceMemory:
    """Every buffer of a plan, allocated at once; all but the weights hold zeros.

    ``addresses[i]`` is the device's address of buffer i, ``ring[i]`` the host's bytes of a ring
    buffer. Raises UnsupportedHereError with the numbers where the plan does not fit.
    """

    def __init__(self, gpu: Gpu, plan: Plan, stream: Handle) -> None:
        reason = lack_of_memory(plan, gpu.free_bytes())
        if reason is not None:
            raise UnsupportedHereError(reason)
        self._gpu = gpu
        self._base = gpu.allocate(max(footprint(plan).total, ALIGNMENT))
        rings = sum(_padded(b.bytes) for b in plan.buffers if b.space == "ring")
        self._ring_memory = gpu.allocate_host(max(rings, ALIGNMENT))
        self._ring_memory.view[:] = 0
        self.addresses, self.ring = self._place(plan)
        weights = footprint(plan).weights
        others = footprint(plan).total - weights
        gpu.fill(self._base + weights, 0, others // 4, stream)

    def _place(self, plan: Plan) -> tuple[tuple[int, ...], dict[int, np.ndarray]]:
        """The weights come first, so that the rest is cleared in one go."""
        addresses = [0] * len(plan.buffers)
        ring: dict[int, np.ndarray] = {}
        place, ring_place = self._base, 0
        order = sorted(range(len(addresses)), key=lambda i: plan.buffers[i].space != "weights")
        for i in order:
            size = plan.buffers[i].bytes
            if plan.buffers[i].space == "ring":
                addresses[i] = self._ring_memory.device_address + ring_place
                ring[i] = self._ring_memory.view[ring_place : ring_place + size]
                ring_place += _padded(size)
            else:
                addresses[i] = place
                place += _padded(size)
        return tuple(addresses), ring

    def close(self) -> None:
        """Gives all of it back."""
        self._gpu.release(self._base)
        self._gpu.release_host(self._ring_memory)


@dataclass(frozen=True, slots=True)
class PortPlace:
    """A port's shape, and the numpy ``dtype`` that holds its elements.

    ``address`` is where it begins on the device, ``nbytes`` its size, ``row_bytes`` that of one row
    of its first axis.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    address: int
    nbytes: int
    row_bytes: int


class Ports:
    """A plan's ports by name: where a row lies, what it holds."""

    def __init__(self, plan: Plan, memory: DeviceMemory) -> None:
        check_ports(plan)
        self._ports = {port.name: port for port in plan.ports}
        # Looked at for every value that a launch is given: too often to be computed each time.
        self._places = {port.name: _place_of(port, memory.addresses) for port in plan.ports}
        self._memory = memory

    def find(self, name: str) -> Port | None:
        """The port, None where the plan has none of this name."""
        return self._ports.get(name)

    def __getitem__(self, name: str) -> PortPlace:
        """The port; EngineFileError where the plan has none of this name."""
        place = self._places.get(name)
        if place is None:
            raise EngineFileError(f"the plan has no port {name!r}; build the engine again")
        return place

    def ring(self, name: str) -> np.ndarray:
        """A port in host memory, as the device's writes show in it."""
        place, port = self[name], self._ports[name]
        held = self._memory.ring.get(port.buffer)
        if held is None:
            raise EngineFileError(f"port {name!r} lies in no ring buffer; build the engine again")
        data = held[port.offset : port.offset + place.nbytes]
        return data.view(place.dtype).reshape(place.shape)


def _place_of(port: Port, addresses: Sequence[int]) -> PortPlace:
    nbytes = _port_bytes(port)
    address = addresses[port.buffer] + port.offset
    return PortPlace(port.shape, _item_type(port), address, nbytes, nbytes // port.shape[0])


def _item_type(port: Port) -> np.dtype[np.generic]:
    """The numpy type that holds the port's elements."""
    if port.dtype not in _ITEMS:
        raise EngineFileError(f"port {port.name!r} has element type {port.dtype!r}; build it again")
    return _ITEMS[port.dtype]


def _port_bytes(port: Port) -> int:
    """Bytes of the whole port."""
    return math.prod(port.shape) * _item_type(port).itemsize


def check_ports(plan: Plan) -> None:
    """Raises EngineFileError where a port lies outside its buffer, or the ring's disagree."""
    for port in plan.ports:
        if not _lies_inside(port, plan.buffers):
            raise EngineFileError(
                f"port {port.name!r} lies outside its buffer; build the engine again"
            )
    _check_ring([port for port in plan.ports if port.name.startswith("ring.")])


def _lies_inside(port: Port, buffers: tuple[Buffer, ...]) -> bool:
    if not 0 <= port.buffer < len(buffers) or min(port.shape, default=0) < 1:
        return False
    last = buffers[port.buffer].bytes - _port_bytes(port)
    return 0 <= port.offset <= last and port.offset % _item_type(port).itemsize == 0


def _check_ring(ports: list[Port]) -> None:
    """Every port has a row for each step, and behind it one for each sequence."""
    most = max(ports, key=lambda port: len(port.shape), default=None)
    for port in ports:
        if most is not None and port.shape[:2] != most.shape[: min(2, len(port.shape))]:
            raise EngineFileError(
                f"ports {most.name!r} {most.shape} and {port.name!r} {port.shape} differ in steps "
                "or sequences; build the engine again"
            )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
