"""Reads YAML files: mappings whose keys are all known."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import SpecbuildError

Record = TypeVar("Record")

_MAX_BYTES = 1 << 20


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a file; SpecbuildError if it has something else."""
    import yaml

    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SpecbuildError(f"{file} has more than {_MAX_BYTES} bytes: it is no such file")
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SpecbuildError(f"{file} cannot be read as YAML ({reason})") from error
    return require_mapping(data, str(file))


def require_mapping(data: Any, where: str) -> dict[str, Any]:
    """Return ``data`` if it is a mapping with strings as keys, else raise SpecbuildError."""
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise SpecbuildError(f"{where}: must hold keys and values")
    return data


def read_yaml(kind: type[Record], file: Path) -> Record:
    """Return a ``kind``, a dataclass of plain types, from the mapping in a file.

    Raises SpecbuildError for an invalid file, an unknown key, and a value of another type.
    """
    return record_of(kind, read_mapping(file), str(file))


def record_of(kind: type[Record], data: Mapping[str, Any], where: str) -> Record:
    """Return a ``kind``, a dataclass, from a mapping; SpecbuildError as :func:`read_yaml`."""
    require_known(data, [field.name for field in fields(kind)], where)  # type: ignore[arg-type]
    return from_json(kind, dict(data), where)


def require_known(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise SpecbuildError for the first unknown key, with the most similar known one."""
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise SpecbuildError(f"{where}: unknown key {key!r}; {meant}")
