"""Pads arrays to the exact shapes of a profile, without an effect on results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbuild.runtime.engine_dir.manifest import Port, Role, ShapeProfile
from specbuild.runtime.errors import OutdatedEngineError, SpecbuildError

# Added rows write to page 0, after the last sequence; added candidates, nodes and pairs are absent.
_FILL: Mapping[str, float] = {
    "scores": -np.inf,
    "parents": -1,
    "count": 1,
    "from_slot": -1,
    "to_slot": -1,
    "top_p": 1,
}
_ENDS = "row_start"  # Added sequences have no rows: they begin where the last one ends.
_HOST_TYPES: Mapping[str, np.dtype[Any]] = {
    "int32": np.dtype(np.int32),
    "float32": np.dtype(np.float32),
    "float": np.dtype(np.float32),
    "bfloat16": np.dtype(np.float32),
}
_DEVICE_TYPES: Mapping[str, np.dtype[Any]] = {**_HOST_TYPES, "bfloat16": np.dtype(np.uint16)}


def device_type(port: Port) -> np.dtype[Any]:
    """Return the numpy type of a port's elements on the device; bf16 as bit patterns."""
    if port.dtype not in _DEVICE_TYPES:
        raise OutdatedEngineError(
            f"port {port.name} has element type {port.dtype!r}, an engine for TensorRT has "
            f"{', '.join(_DEVICE_TYPES)}"
        )
    return _DEVICE_TYPES[port.dtype]


def to_device(array: np.ndarray, port: Port) -> np.ndarray:
    """Return the array in the port's device type: fp32 is rounded to the nearest bf16."""
    if port.dtype != "bfloat16":
        return np.ascontiguousarray(array, device_type(port))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    with_nans = np.where(np.isnan(array), bits | np.uint32(1 << 22), rounded)
    return (with_nans >> np.uint32(16)).astype(np.uint16)


def from_device(array: np.ndarray, port: Port) -> np.ndarray:
    """Return the array in the host's type: bf16 as fp32."""
    if port.dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fitted(array: np.ndarray, port: Port) -> np.ndarray:
    """Return the array with as many axes as the port, which may lack leading axes of size 1."""
    rank = len(port.shape)
    if array.ndim < rank or any(size != 1 for size in array.shape[: array.ndim - rank]):
        raise SpecbuildError(f"port {port.name} takes {port.shape}, got {array.shape}")
    return array.reshape(array.shape[array.ndim - rank :])


def sizes_of(ports: Sequence[Port], feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the size of every named axis, and the value of every scalar under its port's name."""
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
    """Return the first profile that fits these sizes. SpecbuildError if none does."""
    scalars = {port.name for port in role.inputs if not port.shape}
    for index, profile in enumerate(role.profiles):
        if all(_holds(profile, axis, size, axis in scalars) for axis, size in sizes.items()):
            return index
    sizes_ = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    raise SpecbuildError(
        f"the engine of role {name} has no profile for {sizes_}; run fewer sequences or a smaller "
        "draft, or build the engine with larger limits"
    )


def _holds(profile: ShapeProfile, axis: str, size: int, is_value: bool) -> bool:
    limits = profile.axes.get(axis)
    if limits is None:
        return True
    return size <= limits.most and (not is_value or size >= limits.least)


def profile_sizes(profile: ShapeProfile, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the padded size of every axis."""
    smallest = {axis: limits.least for axis, limits in profile.axes.items()}
    return {axis: max(sizes.get(axis, 0), smallest.get(axis, 0)) for axis in {**smallest, **sizes}}


def port_shape(port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the port's shape at these sizes."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in port.shape)


def padded(array: np.ndarray, port: Port, shape: Sequence[int]) -> np.ndarray:
    """Return the array in this shape, with neutral values in the added part."""
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
    """Return the part of an output that belongs to the feeds."""
    needed = (sizes.get(size) if isinstance(size, str) else size for size in port.shape)
    return array[tuple(slice(size) for size in needed)]
