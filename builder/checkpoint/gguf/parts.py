"""A model's GGUF files: a single one, or its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specbuild.builder.checkpoint.gguf.container import GgufFile, GgufTensor, read_gguf
from specbuild.builder.checkpoint.gguf.keys import Value
from specbuild.builder.checkpoint.source import shorten
from specbuild.runtime.errors import SpecbuildError

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufModel:
    """The keys of the first file and the tensors of all ``files``."""

    path: Path
    files: tuple[Path, ...]
    keys: dict[str, Value]
    tensors: dict[str, GgufTensor]


def open_model(path: Path) -> GgufModel:
    """Read the headers of the file at ``path`` and of the other parts in its folder.

    Raises SpecbuildError if one is missing, damaged, or not the part of its name.
    """
    first = read_gguf(path)
    count = _number(first, "split.count", 1)
    if count <= 1:
        return GgufModel(path, (path,), first.keys, first.tensors)
    files = _part_files(path, first, count)
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        part = first if number == 0 else read_gguf(file)
        _check_part(part, number, count)
        twice = sorted(set(part.tensors) & set(tensors))
        if twice:
            raise SpecbuildError(
                f"{file}: {shorten(twice)} also in {tensors[twice[0]].file.name}; a tensor may "
                "stand in one part only"
            )
        tensors |= part.tensors
    wanted = _number(first, "split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise SpecbuildError(
            f"{path}: its parts hold {len(tensors)} tensors, split.tensors.count says {wanted}; "
            "download them again"
        )
    return GgufModel(path, files, first.keys, tensors)


def _part_files(path: Path, first: GgufFile, count: int) -> tuple[Path, ...]:
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise SpecbuildError(
            f"{path}: is one of {count} parts, which are found by their names; call them "
            f"NAME-00001-of-{count:05d}.gguf and so on"
        )

    def part(number: int) -> Path:
        return path.parent / f"{named['stem']}-{number:05d}-of-{count:05d}.gguf"

    if _number(first, "split.no", 0) != 0 or int(named["number"]) != 1:
        raise SpecbuildError(f"{path}: is not the first of {count} parts; give {part(1)}")
    # The name has five digits for the count, so there are never more.
    files = tuple(part(number) for number in range(1, count + 1))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise SpecbuildError(
            f"{path}: {shorten(absent)} not in {path.parent}; download the missing parts"
        )
    return files


def _check_part(part: GgufFile, number: int, count: int) -> None:
    said = _number(part, "split.no", -1), _number(part, "split.count", -1)
    if said != (number, count):
        raise SpecbuildError(
            f"{part.path}: says that it is part {said[0] + 1} of {said[1]}, its name says "
            f"{number + 1} of {count}; download it again"
        )


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecbuildError(f"{file.path}: {key}: got {value!r}, expected a whole number")
    return value
