"""The tactic file: which variant of an op's kernels was fastest on a GPU, shape by shape."""

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
# Rows: what is fastest for 5 is for 8, so every power of two stands for those below it.
_ROW_AXES = ("T", "R")
# How much a pool or a table could hold does not tell how much a launch reads of it.
_UNREAD_AXES = ("pages", "P", "P_and_factors", "B1")
UNREAD = "*"


@dataclass(frozen=True)
class TacticEntry:
    """The fastest tactic of a shape; ``tactic`` is empty where that is the default.

    ``shapes`` are the tensors as :func:`shape_key` writes them, ``sources`` the kernel files that
    any candidate launches. ``code`` is a digest of the machine code that the tactic launches at
    these sizes, ``compiler`` the NVRTC that made it, such as 13.5; it is empty where the tactic is
    known at fewer rows only. Times are medians of one call, in microseconds.
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
        """What it is found by."""
        return _key(self.op, self.phase, self.shapes, self.attributes)


@dataclass(frozen=True)
class TacticFile:
    """What was measured on one GPU: ``gpu`` as ``--gpu`` names it, ``device`` as its driver does.

    ``kernels`` gives the digest of every kernel file, its headers included, that an entry names:
    of the sources that give the entries' machine code.
    """

    version: int
    gpu: str
    device: str
    kernels: dict[str, str]
    entries: tuple[TacticEntry, ...]

    def stale_sources(self) -> tuple[str, ...]:
        """The kernel files that are not what they were when this was measured."""
        return tuple(name for name, digest in self.kernels.items() if source_digest(name) != digest)

    def with_entries(self, entries: Iterable[TacticEntry]) -> TacticFile:
        """These in addition, in place of those of the same shapes."""
        merged = {entry.key: entry for entry in (*self.entries, *entries)}
        return tactic_file(self.gpu, self.device, merged.values())


def tactic_file(gpu: str, device: str, entries: Iterable[TacticEntry]) -> TacticFile:
    """A file of entries that the kernels that are here gave, in the order of their keys."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.key))
    sources = sorted({name for entry in ordered for name in entry.sources})
    kernels = {name: source_digest(name) or "" for name in sources}
    return TacticFile(VERSION, gpu, device, kernels, ordered)


def read_tactics(path: Path) -> TacticFile:
    """Reads and checks a file. SpecbuildError where it is none, or of another format."""
    try:
        decoded = parsed(path.read_bytes())
    except OSError as error:
        raise SpecbuildError(
            f"{path} cannot be read ({error.strerror}); give a file that specbuild tune wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecbuildError(
            f"{path} is no tactic file: it is not JSON ({error}); {REMEDY}"
        ) from error
    found = decoded.get("version") if isinstance(decoded, dict) else None
    if found != VERSION:
        raise SpecbuildError(
            f"{path} is a tactic file of version {found!r}, this specbuild reads {VERSION}; "
            f"{REMEDY}"
        )
    try:
        file = from_json(TacticFile, decoded, path.name)
    except (SpecbuildError, RecursionError) as error:
        raise SpecbuildError(f"{path} is no tactic file: {error}; {REMEDY}") from error
    _check(path, file)
    return file


def write_tactics(path: Path, file: TacticFile) -> None:
    """Writes a file; what the name held before is there until the new one is whole."""
    sources = dict(sorted(file.kernels.items()))
    try:
        replace_bytes(path, json_bytes(replace(file, kernels=sources)))
    except OSError as error:
        raise SpecbuildError(
            f"{path} cannot be written ({error.strerror}); choose another --output"
        ) from error


def shape_key(op: OpSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The tensors as an entry names them: ``bfloat16[8,2880]``, rows rounded up, ``*`` unread."""
    return {
        name: f"{info.dtype}[{','.join(_sizes(axes_of(op, name, len(info.shape)), info.shape))}]"
        for name, info in sorted(tensors.items())
    }


def request_key(op: OpSpec, request: LoweringRequest) -> str:
    """What the entry of a request is found by."""
    return _key(op.name, request.phase, shape_key(op, request.tensors), request.attributes)


def axes_of(op: OpSpec, name: str, rank: int) -> tuple[str, ...]:
    """The names of a tensor's axes; empty ones where the declaration has none for this rank."""
    axes = op.tensor(name).axes
    return axes if len(axes) == rank else ("",) * rank


def _sizes(axes: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    return [
        UNREAD if axis in _UNREAD_AXES else str(_power_of_two(size) if axis in _ROW_AXES else size)
        for axis, size in zip(axes, shape, strict=True)
    ]


def _power_of_two(size: int) -> int:
    """The least power of two that is not below ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _key(op: str, phase: str, shapes: Mapping[str, str], attributes: Mapping[str, Any]) -> str:
    """An attribute that an op got later has its default in entries that do not say it."""
    with suppress(KeyError, ValueError):  # what is no op of this specbuild is asked for by nobody
        attributes = op_named(op).complete(attributes)
    return json.dumps([op, phase, dict(shapes), dict(attributes)], sort_keys=True)


def _check(path: Path, file: TacticFile) -> None:
    keys = [entry.key for entry in file.entries]
    if len(set(keys)) != len(keys):
        raise SpecbuildError(f"{path} names a shape twice; {REMEDY}")
    named = {name for entry in file.entries for name in entry.sources}
    if named != set(file.kernels):
        raise SpecbuildError(
            f"{path} has digests of {len(file.kernels)} kernel files, its entries name "
            f"{len(named)}; {REMEDY}"
        )
    for name in file.kernels:
        if not _is_inside(name):
            raise SpecbuildError(f"{path} names {name!r}, which is no kernel file; {REMEDY}")


def _is_inside(name: str) -> bool:
    """Whether a name can be that of a kernel file."""
    try:
        return (PLUGINS / name).resolve().is_relative_to(PLUGINS.resolve())
    except (ValueError, OSError):  # a zero byte, half a surrogate pair
        return False
