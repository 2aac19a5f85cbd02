"""One GGUF file: its keys and its tensors, all checked against the file before any is read."""

from __future__ import annotations

import math
import mmap
import stat
from dataclasses import dataclass
from pathlib import Path

from specbuild.builder.checkpoint.gguf.block_types import BlockType, block_type
from specbuild.builder.checkpoint.gguf.cursor import Cursor
from specbuild.builder.checkpoint.gguf.keys import Value, key_count, read_keys
from specbuild.runtime.errors import SpecbuildError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_MAX_AXES, _MAX_NAME_BYTES = 4, 1 << 10
_MAX_TENSORS, _MAX_VALUES = 1 << 18, 1 << 23
_MAX_BYTES = 1 << 62


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: ``shape`` in numpy's order, ``offset`` from the file's start in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of one file."""

    path: Path
    keys: dict[str, Value]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as a GGUF file, or has its name."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf" and not path.is_dir()
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read the header of one file.

    Raises SpecbuildError if the file is invalid, truncated or damaged, or has an unsupported type
    of tensors.
    """
    cursor = Cursor(str(path), _mapped(path), _MAX_VALUES)
    _check_version(cursor)
    tensor_count = cursor.count("tensors", least_bytes=24, most=_MAX_TENSORS)
    keys = read_keys(cursor, key_count(cursor))
    alignment = _alignment(cursor.where, keys)
    infos = [_tensor(cursor, path) for _ in range(tensor_count)]
    start = -(-cursor.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise SpecbuildError(f"{path}: tensor {info.name} stands there twice")
        if info.offset % alignment:
            raise SpecbuildError(
                f"{path}: tensor {info.name} lies at byte {info.offset}, no multiple of "
                f"{alignment}; the file is damaged, download it again"
            )
        place = start + info.offset
        tensors[info.name] = GgufTensor(info.name, info.shape, info.kind, path, place, info.nbytes)
    _check_extents(path, cursor.end, list(tensors.values()))
    return GgufFile(path, keys, tensors)


def _mapped(path: Path) -> mmap.mmap:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SpecbuildError(f"{path}: is no regular file")
        if found.st_size < len(MAGIC):
            raise SpecbuildError(f"{path}: is no GGUF file ({found.st_size} bytes)")
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SpecbuildError(f"{path}: cannot be read ({error.strerror})") from None


def _check_version(cursor: Cursor) -> None:
    start = cursor.skip(len(MAGIC), "its first bytes")
    if cursor.data[start : start + len(MAGIC)] != MAGIC:
        raise SpecbuildError(f"{cursor.where}: is no GGUF file, it does not begin with GGUF")
    version = cursor.u32("its version")
    if version & 0xFFFF == 0 and version:
        raise SpecbuildError(
            f"{cursor.where}: is a big-endian GGUF file, only little-endian ones are read; get "
            "the model for other machines"
        )
    if version not in VERSIONS:
        raise SpecbuildError(
            f"{cursor.where}: is GGUF of version {version}, versions 2 and 3 are read; get a "
            "newer conversion"
        )


def _alignment(where: str, keys: dict[str, Value]) -> int:
    value = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):  # type: ignore[operator]
        raise SpecbuildError(
            f"{where}: general.alignment: got {value!r}, expected a power of two of at most "
            f"{_MAX_ALIGNMENT}"
        )
    assert isinstance(value, int)
    return value


def _tensor(cursor: Cursor, path: Path) -> GgufTensor:
    """Return the next entry; its offset is relative to the start of the data."""
    name = cursor.text("the name of a tensor", _MAX_NAME_BYTES)
    axes = cursor.u32(f"the axes of {name}")
    if not 1 <= axes <= _MAX_AXES:
        raise SpecbuildError(
            f"{path}: tensor {name} has {axes} axes, expected 1 to {_MAX_AXES}; the file is "
            "damaged, download it again"
        )
    shape = tuple(cursor.u64(f"the shape of {name}") for _ in range(axes))[::-1]
    kind = block_type(cursor.where, name, cursor.u32(f"the type of {name}"))
    offset = cursor.u64(f"the place of {name}")
    elements = math.prod(shape)
    if not 0 < elements < _MAX_BYTES or offset > _MAX_BYTES:
        raise SpecbuildError(
            f"{path}: tensor {name} of shape {list(shape)} at byte {offset} fits no file; the "
            "file is damaged, download it again"
        )
    if shape[-1] % kind.elements:
        raise SpecbuildError(
            f"{path}: tensor {name} has rows of {shape[-1]}, {kind.name} stores {kind.elements} "
            "numbers together; the file is damaged, download it again"
        )
    return GgufTensor(name, shape, kind, path, offset, elements // kind.elements * kind.nbytes)


def _check_extents(path: Path, size: int, tensors: list[GgufTensor]) -> None:
    """Check that every tensor is within the file, and that none overlap."""
    before = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if before is not None and before.offset + before.nbytes > tensor.offset:
            raise SpecbuildError(
                f"{path}: tensors {before.name} and {tensor.name} overlap; the file is damaged, "
                "download it again"
            )
        if tensor.offset + tensor.nbytes > size:
            raise SpecbuildError(
                f"{path}: holds {size} bytes, but tensor {tensor.name} ends at "
                f"{tensor.offset + tensor.nbytes}; the file is truncated, download it again"
            )
        before = tensor
