"""The tactic file: the fastest kernel variant of an op on a GPU, by shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specbuild.builder.backends.cuda.compile.source import PLUGINS, source_digest
from specbuild.builder.durable import replace_bytes
from specbuild.builder.engine.writer import json_bytes
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import SpecbuildError

VERSION = 2
REMEDY = "measure with specbuild tune again"
# Numbers of rows are rounded up to powers of two, because they have the same fastest tactics.
_ROW_AXES = ("T", "R")
# Capacities of pools and tables, which do not determine how much a launch reads.
_UNREAD_AXES = ("pages", "P", "P_and_factors", "B1")
UNREAD = "*"


@dataclass(frozen=True)
class TacticEntry:
    """The fastest tactic of a shape; ``tactic`` is empty for the default.

    ``shapes`` are the tensors in the form of :func:`shape_key`. ``sources`` are the kernel files of
    all candidates. ``code`` is a digest of the machine code of the tactic's kernels at these sizes.
    It is empty if only smaller numbers of rows support the tactic. ``compiler`` is the version of
    NVRTC, such as 13.5. Times are medians of one call, in microseconds.
    """

    op: str
    phase: Literal["decode", "prefill"]
    shapes: dict[str, str]
    attributes: dict[str, Any]
    sources: tuple[str, ...]
    tactic: dict[str, int]
    median_us: float
    default_us: float
    code: str
    compiler: str

    @property
    def key(self) -> str:
        """The key of the entry."""
        return _key(self.op, self.phase, self.shapes, self.attributes)


@dataclass(frozen=True)
class TacticFile:
    """Measurements on one GPU: ``gpu`` is its name for ``--gpu``, ``device`` that of its driver.

    ``kernels`` has a digest of every kernel file in the entries, including its headers.
    """

    version: int
    gpu: str
    device: str
    kernels: dict[str, str]
    entries: tuple[TacticEntry, ...]

    def stale_sources(self) -> tuple[str, ...]:
        """Return the kernel files that changed since the measurements."""
        return tuple(name for name, digest in self.kernels.items() if source_digest(name) != digest)

    def with_entries(self, entries: Iterable[TacticEntry]) -> TacticFile:
        """Return the file with these entries added; they replace those of the same shapes."""
        merged = {entry.key: entry for entry in (*self.entries, *entries)}
        return tactic_file(self.gpu, self.device, merged.values())


def tactic_file(gpu: str, device: str, entries: Iterable[TacticEntry]) -> TacticFile:
    """Return a file of entries with digests of the current sources, ordered by key."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.key))
    sources = sorted({name for entry in ordered for name in entry.sources})
    kernels = {name: source_digest(name) or "" for name in sources}
    return TacticFile(VERSION, gpu, device, kernels, ordered)


def read_tactics(path: Path) -> TacticFile:
    """Read and check a file. SpecbuildError if it is invalid, or has another version."""
    try:
        decoded = parsed(path.read_bytes())
    except OSError as error:
        raise SpecbuildError(
            f"{path} cannot be read ({error.strerror}); use a file written by specbuild tune"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecbuildError(
            f"{path} is not a tactic file: it is not JSON ({error}); {REMEDY}"
        ) from error
    version = decoded.get("version") if isinstance(decoded, dict) else None
    if version != VERSION:
        raise SpecbuildError(
            f"{path}: got tactic file version {version!r}, expected {VERSION}; {REMEDY}"
        )
    try:
        file = from_json(TacticFile, decoded, path.name)
    except (SpecbuildError, RecursionError) as error:
        raise SpecbuildError(f"{path} is not a tactic file: {error}; {REMEDY}") from error
    _check(path, file)
    return file


def write_tactics(path: Path, file: TacticFile) -> None:
    """Write a file atomically."""
    sources = dict(sorted(file.kernels.items()))
    try:
        replace_bytes(path, json_bytes(replace(file, kernels=sources)))
    except OSError as error:
        raise SpecbuildError(
            f"{path} cannot be written ({error.strerror}); choose another --output"
        ) from error


def shape_key(op: OpSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the tensors as an entry has them: ``bfloat16[8,2880]``, rows rounded up."""
    return {
        name: f"{info.dtype}[{','.join(_sizes(axes_of(op, name, len(info.shape)), info.shape))}]"
        for name, info in sorted(tensors.items())
    }


def request_key(op: OpSpec, request: LoweringRequest) -> str:
    """Return the key of the entry for a request."""
    return _key(op.name, request.phase, shape_key(op, request.tensors), request.attributes)


def axes_of(op: OpSpec, name: str, rank: int) -> tuple[str, ...]:
    """Return the names of a tensor's axes; empty names if the op declares another rank."""
    axes = op.tensor(name).axes
    return axes if len(axes) == rank else ("",) * rank


def _sizes(axes: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    return [
        UNREAD if axis in _UNREAD_AXES else str(_power_of_two(size) if axis in _ROW_AXES else size)
        for axis, size in zip(axes, shape, strict=True)
    ]


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _key(op: str, phase: str, shapes: Mapping[str, str], attributes: Mapping[str, Any]) -> str:
    """Return a key in which attributes added to the op later have their defaults."""
    with suppress(KeyError, ValueError):  # the op does not exist in this version
        attributes = op_named(op).complete(attributes)
    return json.dumps([op, phase, dict(shapes), dict(attributes)], sort_keys=True)


def _check(path: Path, file: TacticFile) -> None:
    keys = [entry.key for entry in file.entries]
    if len(set(keys)) != len(keys):
        raise SpecbuildError(f"{path} has two entries for one shape; {REMEDY}")
    entry_sources = {name for entry in file.entries for name in entry.sources}
    if entry_sources != set(file.kernels):
        raise SpecbuildError(
            f"{path}: got digests of {len(file.kernels)} kernel files, expected "
            f"{len(entry_sources)}; {REMEDY}"
        )
    for name in file.kernels:
        if not _is_inside(name):
            raise SpecbuildError(f"{path}: {name!r} is not the name of a kernel file; {REMEDY}")


def _is_inside(name: str) -> bool:
    """Return whether a name can be that of a kernel file."""
    try:
        return (PLUGINS / name).resolve().is_relative_to(PLUGINS.resolve())
    except (ValueError, OSError):  # a zero byte, or half of a surrogate pair
        return False
