"""An engine's weights: safetensors files, parsed strictly and without gaps between tensors.

``weights.safetensors`` has the tensors of all ranks. In an engine of several ranks
``weights.0.safetensors`` and so on each have one rank's part of the sharded tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.runtime.engine_dir.claims_check import max_header_bytes
from specbuild.runtime.engine_dir.files import mapped_file, read_file
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest, StoredTensor
from specbuild.runtime.engine_dir.ranks import tensors_in
from specbuild.runtime.engine_dir.strict_json import parsed
from specbuild.runtime.errors import OutdatedEngineError

TensorMap = dict[str, np.ndarray]

# The spelling of safetensors. numpy has no bf16: such a tensor is read as 16-bit patterns.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_LENGTH_BYTES = 8


def open_weights(directory: Path, manifest: Manifest) -> TensorMap:
    """Return the tensors of ``weights.safetensors`` by name, as read-only mapped arrays.

    Names, dtypes and shapes are those of the manifest. Raises EngineFileError.
    """
    data = read_file(directory, manifest, WEIGHTS_FILE)
    return tensors_of(data, tensors_in(manifest, WEIGHTS_FILE), f"{directory}: {WEIGHTS_FILE}")


def weight_spans(
    directory: Path, manifest: Manifest, file: str = WEIGHTS_FILE
) -> dict[str, tuple[int, int]]:
    """Return the offset and size in bytes of each tensor in a weights file.

    Reads only the file's header and checks no digest: the reader of the tensors does. Raises
    EngineFileError.
    """
    data = mapped_file(directory, manifest, file)
    tensors = tensors_of(data, tensors_in(manifest, file), f"{directory}: {file}")
    start = np.frombuffer(data, np.uint8).ctypes.data
    return {name: (array.ctypes.data - start, array.nbytes) for name, array in tensors.items()}


def tensors_of(data: memoryview, expected: Mapping[str, StoredTensor], where: str) -> TensorMap:
    """Return read-only arrays over ``data``, exactly the ``expected`` ones.

    Raises EngineFileError if the header is malformed, a tensor is outside the file, two overlap,
    bytes are unused, or names, dtypes or shapes differ from ``expected``.
    """
    header, start = _header(data, expected, where)
    header.pop("__metadata__", None)
    stored = {name for name, tensor in expected.items() if tensor.same_as is None}
    missing, extra = sorted(stored - set(header)), sorted(set(header) - stored)
    if missing or extra:
        raise OutdatedEngineError(
            f"{where}: tensors missing {missing[:3]}, not in the manifest {extra[:3]}"
        )
    arrays, spans = {}, []
    for name, entry in header.items():
        first, end = _span(name, entry, expected[name], where)
        spans.append((first, end, name))
        if start + end > len(data):
            raise OutdatedEngineError(f"{where}: tensor {name} ends outside the file")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if (start + first) % dtype.itemsize:
            raise OutdatedEngineError(f"{where}: tensor {name} is not aligned")
        arrays[name] = np.frombuffer(data[start + first : start + end], dtype).reshape(shape)
    _check_cover(spans, len(data) - start, where)
    for name, tensor in expected.items():
        if tensor.same_as is not None:
            arrays[name] = _same(name, tensor, expected, arrays, where)
    return arrays


def _same(
    name: str,
    tensor: StoredTensor,
    expected: Mapping[str, StoredTensor],
    arrays: TensorMap,
    where: str,
) -> np.ndarray:
    """Return the array of a tensor that is stored under another name."""
    other = expected.get(tensor.same_as or "")
    if other is None or other.same_as is not None or tensor.same_as not in arrays:
        raise OutdatedEngineError(
            f"{where}: tensor {name} is to be {tensor.same_as}, which is not stored"
        )
    if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        raise OutdatedEngineError(
            f"{where}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {tensor.same_as}, "
            f"which it is to be, {other.dtype} {list(other.shape)}"
        )
    return arrays[tensor.same_as]


def _header(
    data: memoryview, expected: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, Any], int]:
    """Return the header's object, and the offset of the tensors' bytes."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or start > len(data):
        raise OutdatedEngineError(f"{where}: its header ends outside the file")
    bound = max_header_bytes(expected)
    if length > bound:
        raise OutdatedEngineError(
            f"{where}: its header has {length} bytes, its tensors need {bound} at most"
        )
    try:
        header = parsed(bytes(data[_LENGTH_BYTES:start]))
    except ValueError as error:
        raise OutdatedEngineError(f"{where}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise OutdatedEngineError(f"{where}: its header is no object")
    return header, start


def _span(name: str, entry: Any, expected: StoredTensor, where: str) -> tuple[int, int]:
    """Return the offsets of a tensor, after a comparison of its entry with the manifest."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise OutdatedEngineError(f"{where}: the entry of tensor {name} is malformed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype != expected.dtype or shape != list(expected.shape):
        raise OutdatedEngineError(
            f"{where}: tensor {name} is {dtype} {shape}, the manifest says "
            f"{expected.dtype} {list(expected.shape)}"
        )
    if dtype not in DTYPES:
        raise OutdatedEngineError(f"{where}: tensor {name} has dtype {dtype}")
    if not (isinstance(offsets, list) and [type(o) for o in offsets] == [int, int]):
        raise OutdatedEngineError(f"{where}: the offsets of tensor {name} are malformed")
    first, end = offsets
    if first < 0 or end - first != prod(expected.shape) * DTYPES[dtype].itemsize:
        raise OutdatedEngineError(f"{where}: tensor {name} has another size than its shape")
    return first, end


def _check_cover(spans: list[tuple[int, int, str]], total: int, where: str) -> None:
    reached = 0
    for first, end, name in sorted(spans):
        if first != reached:
            problem = "overlaps the one before" if first < reached else "leaves a gap before it"
            raise OutdatedEngineError(f"{where}: tensor {name} {problem}")
        reached = end
    if reached != total:
        raise OutdatedEngineError(f"{where}: {total - reached} bytes belong to no tensor")
