"""Records from YAML files that people write: every key known, every value of its kind."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import SpecbuildError

Record = TypeVar("Record")

_MAX_BYTES = 1 << 20


def read_yaml(kind: type[Record], file: Path) -> Record:
    """A ``kind``, a dataclass of plain types, from the mapping that a YAML file holds.

    Raises SpecbuildError for a file that is none, and for a key that is unknown, with the known one
    that is nearest.
    """
    data = _loaded(file)
    _require_known(kind, data, str(file))
    return from_json(kind, data, str(file))


def unknown_key(key: object, known: list[str], where: str) -> SpecbuildError:
    """The refusal of a key, with what may have been meant."""
    near = difflib.get_close_matches(str(key), known, n=1)
    meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return SpecbuildError(f"{where}: unknown key {str(key)!r}; {meant}")


def _loaded(file: Path) -> Any:
    import yaml

    try:
        if file.stat().st_size > _MAX_BYTES:
            raise SpecbuildError(f"{file} has more than {_MAX_BYTES} bytes: it is no such file")
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SpecbuildError(f"{file} cannot be read as YAML ({reason})") from error
    return data


def _require_known(kind: type, data: Any, where: str) -> None:
    if not isinstance(data, dict):
        raise SpecbuildError(f"{where}: must hold keys and values")
    known = [field.name for field in fields(kind)]
    for key in data:
        if key not in known:
            raise unknown_key(key, known, where)
