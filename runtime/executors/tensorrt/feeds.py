"""Arrays of any size in the exact shapes of a profile: what is added changes no result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbuild.runtime.engine_dir.manifest import Port, Role, ShapeProfile
from specbuild.runtime.errors import EngineFileError, SpecbuildError

# Added rows lie in page 0 behind the last sequence; added candidates, nodes and pairs are absent.
_FILL: Mapping[str, float] = {
    "scores": -np.inf,
    "parents": -1,
    "count": 1,
    "from_slot": -1,
    "to_slot": -1,
    "top_p": 1,
}
_ENDS = "row_start"  # sequences that are added have no rows: they begin where the last one ends
_HOST_TYPES: Mapping[str, np.dtype[Any]] = {
    "int32": np.dtype(np.int32),
    "float32": np.dtype(np.float32),
    "float": np.dtype(np.float32),
    "bfloat16": np.dtype(np.float32),
}
_DEVICE_TYPES: Mapping[str, np.dtype[Any]] = {**_HOST_TYPES, "bfloat16": np.dtype(np.uint16)}


def device_type(port: Port) -> np.dtype[Any]:
    """The numpy type of a port's elements on the device; bf16 as its bit patterns."""
    if port.dtype not in _DEVICE_TYPES:
        raise EngineFileError(
            f"port {port.name} has element type {port.dtype!r}, an engine for TensorRT has "
            f"{', '.join(_DEVICE_TYPES)}; build the engine again"
        )
    return _DEVICE_TYPES[port.dtype]


def to_device(array: np.ndarray, port: Port) -> np.ndarray:
    """The array in the port's device type: fp32 is rounded to the nearest bf16."""
    if port.dtype != "bfloat16":
        return np.ascontiguousarray(array, device_type(port))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(array), bits | np.uint32(1 << 22), rounded)
    return (kept >> np.uint32(16)).astype(np.uint16)


def from_device(array: np.ndarray, port: Port) -> np.ndarray:
    """What the host computes with: bf16 as fp32."""
    if port.dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fitted(array: np.ndarray, port: Port) -> np.ndarray:
    """The array with as many axes as the port: leading axes of size 1 may be gone there."""
    rank = len(port.shape)
    if array.ndim < rank or any(size != 1 for size in array.shape[: array.ndim - rank]):
        raise SpecbuildError(f"port {port.name} takes {port.shape}, got {array.shape}")
    return array.reshape(array.shape[array.ndim - rank :])


def sizes_of(ports: Sequence[Port], feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The size of every named axis, and the value of every scalar under its port's name."""
    sizes: dict[str, int] = {}
    for port in ports:
        if port.name not in feeds:
            continue
        array = fitted(np.asarray(feeds[port.name]), port)
        if not port.shape:
            sizes[port.name] = int(array)
        for axis, size in zip(port.shape, array.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise SpecbuildError(f"port {port.name}: axis {axis} is {size}, was {sizes[axis]}")
    return sizes


def chosen_profile(name: str, role: Role, sizes: Mapping[str, int]) -> int:
    """The first profile that holds these sizes. SpecbuildError where none does."""
    scalars = {port.name for port in role.inputs if not port.shape}
    for index, profile in enumerate(role.profiles):
        if all(_holds(profile, axis, size, axis in scalars) for axis, size in sizes.items()):
            return index
    shown = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise SpecbuildError(
        f"the engine of role {name} has no profile for {shown}; run fewer sequences or a smaller "
        "draft, or build the engine with larger limits"
    )


def _holds(profile: ShapeProfile, axis: str, size: int, is_value: bool) -> bool:
    held = profile.axes.get(axis)
    if held is None:
        return True
    return size <= held.most and (not is_value or size >= held.least)


def profile_sizes(profile: ShapeProfile, sizes: Mapping[str, int]) -> dict[str, int]:
    """The size that every axis is padded to."""
    least = {axis: held.least for axis, held in profile.axes.items()}
    return {axis: max(sizes.get(axis, 0), least.get(axis, 0)) for axis in {**least, **sizes}}


def port_shape(port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The port's shape at these sizes."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in port.shape)


def padded(array: np.ndarray, port: Port, shape: Sequence[int]) -> np.ndarray:
    """The array in this shape, what is added filled so that it does nothing."""
    if array.shape == tuple(shape):
        return array
    if any(have > want for have, want in zip(array.shape, shape, strict=True)):
        raise SpecbuildError(f"port {port.name} holds {tuple(shape)}, got {array.shape}")
    name = port.name.rpartition(".")[2]
    fill = array[-1] if name == _ENDS else _FILL.get(name, 0)
    out = np.full(shape, fill, array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def used(array: np.ndarray, port: Port, sizes: Mapping[str, int]) -> np.ndarray:
    """The part of an output that the feeds asked for."""
    wanted = (sizes.get(size) if isinstance(size, str) else size for size in port.shape)
    return array[tuple(slice(size) for size in wanted)]
