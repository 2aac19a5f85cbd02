"""The placement of a plan's buffers: one arena on the device, and the ring in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.engine_dir.plan import Buffer, Plan, Port
from specbuild.runtime.errors import OutdatedEngineError, UnsupportedHereError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle

# Bulk copies require 128 bytes; cuMemAlloc itself aligns to at least 512.
ALIGNMENT = 512
# Code, graphs and the driver's own data, which no plan states.
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
    """Device memory of a rank for a plan: its buffers by space, including padding."""

    weights: int
    cache: int
    state: int
    arena: int
    exchange: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.cache + self.state + self.arena + self.exchange


def footprint(plan: Plan) -> Footprint:
    """Return the memory of the plan's buffers, without allocating."""
    sizes = {space: 0 for space in ("weights", "cache", "state", "ring", "arena", "exchange")}
    for buffer in plan.buffers:
        sizes[buffer.space] += _padded(buffer.bytes)
    sizes.pop("ring")
    return Footprint(**sizes)


def lack_of_memory(plan: Plan, free_bytes: int) -> str | None:
    """Return why the plan does not fit into free memory, or None if it does."""
    planned = footprint(plan)
    needed = planned.total + RESERVE_BYTES
    if needed <= free_bytes:
        return None
    gib = 2**30
    return (
        f"weights {planned.weights / gib:.2f}, caches {planned.cache / gib:.2f}, the rest "
        f"{(needed - planned.weights - planned.cache) / gib:.2f}: {needed / gib:.2f} GiB of device "
        f"memory are needed, {free_bytes / gib:.2f} GiB are free; close what else uses the GPU, "
        "or build the engine with a smaller --max-seq-len or --max-batch-size"
    )


class DeviceMemory:
    """All buffers of a plan, allocated at once; all except the weights are zero.

    ``addresses[i]`` is the device address of buffer i, ``ring[i]`` the host bytes of a ring buffer.
    Raises UnsupportedHereError with the sizes if the plan does not fit.
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
        """Return offsets with the weights first, so that the rest is cleared by one call."""
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
        """Release everything."""
        self._gpu.release(self._base)
        self._gpu.release_host(self._ring_memory)


@dataclass(frozen=True, slots=True)
class PortPlace:
    """A port's shape, and the numpy ``dtype`` of its elements.

    ``address`` is its start on the device, ``nbytes`` its size, ``row_bytes`` the size of one row
    of its first axis.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    address: int
    nbytes: int
    row_bytes: int


class Ports:
    """A plan's ports by name, with the addresses of their rows."""

    def __init__(self, plan: Plan, memory: DeviceMemory) -> None:
        check_ports(plan)
        self._ports = {port.name: port for port in plan.ports}
        # Cached because it is needed for every value that a launch receives.
        self._places = {port.name: _place_of(port, memory.addresses) for port in plan.ports}
        self._memory = memory

    def find(self, name: str) -> Port | None:
        """Return the port, or None if the plan has none of this name."""
        return self._ports.get(name)

    def __getitem__(self, name: str) -> PortPlace:
        """Return the port; EngineFileError if the plan has none of this name."""
        place = self._places.get(name)
        if place is None:
            raise OutdatedEngineError(f"the plan has no port {name!r}")
        return place

    def ring(self, name: str) -> np.ndarray:
        """Return a port in host memory, which shows the device's writes."""
        place, port = self[name], self._ports[name]
        ring_bytes = self._memory.ring.get(port.buffer)
        if ring_bytes is None:
            raise OutdatedEngineError(f"port {name!r} lies in no ring buffer")
        data = ring_bytes[port.offset : port.offset + place.nbytes]
        return data.view(place.dtype).reshape(place.shape)


def _place_of(port: Port, addresses: Sequence[int]) -> PortPlace:
    nbytes = _port_bytes(port)
    address = addresses[port.buffer] + port.offset
    return PortPlace(port.shape, _item_type(port), address, nbytes, nbytes // port.shape[0])


def _item_type(port: Port) -> np.dtype[np.generic]:
    """Return the numpy type of the port's elements."""
    if port.dtype not in _ITEMS:
        raise OutdatedEngineError(f"port {port.name!r} has element type {port.dtype!r}")
    return _ITEMS[port.dtype]


def _port_bytes(port: Port) -> int:
    """Return the bytes of the port."""
    return math.prod(port.shape) * _item_type(port).itemsize


def check_ports(plan: Plan) -> None:
    """Raise EngineFileError if a port is outside its buffer, or the ring's ports disagree."""
    for port in plan.ports:
        if not _lies_inside(port, plan.buffers):
            raise OutdatedEngineError(f"port {port.name!r} lies outside its buffer")
    _check_ring([port for port in plan.ports if port.name.startswith("ring.")])


def _lies_inside(port: Port, buffers: tuple[Buffer, ...]) -> bool:
    if not 0 <= port.buffer < len(buffers) or min(port.shape, default=0) < 1:
        return False
    last = buffers[port.buffer].bytes - _port_bytes(port)
    return 0 <= port.offset <= last and port.offset % _item_type(port).itemsize == 0


def _check_ring(ports: list[Port]) -> None:
    """Check that every ring port has a row for each step, and in it one for each sequence."""
    widest = max(ports, key=lambda port: len(port.shape), default=None)
    for port in ports:
        if widest is not None and port.shape[:2] != widest.shape[: min(2, len(port.shape))]:
            raise OutdatedEngineError(
                f"ports {widest.name!r} {widest.shape} and {port.name!r} {port.shape} differ in "
                "steps or sequences"
            )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
