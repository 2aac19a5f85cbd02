"""The file format of a program: tensors that many ops share are stored once, in a table.

It is the JSON of ``plan.Program`` preceded by ``tensors``: rows of buffer, offset, shape and
element type. The ops' inputs and outputs are row numbers. A file is read before its program is
recorded, and repeated tensors took half of that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = ("buffer", "offset", "shape", "dtype")
_BOUND = ("inputs", "outputs")


def with_table(program: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file format of a program's decoded JSON."""
    rows: dict[tuple[Any, ...], int] = {}

    def row(binding: Mapping[str, Any]) -> int:
        buffer, offset, shape, dtype = (binding[name] for name in _COLUMNS)
        return rows.setdefault((buffer, offset, tuple(shape), dtype), len(rows))

    ops = [
        {**op, **{kind: {n: row(b) for n, b in op[kind].items()} for kind in _BOUND}}
        for op in program["ops"]
    ]
    return {"tensors": [list(each) for each in rows], **program, "ops": ops}


def without_table(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return a program's JSON from its file; LookupError, TypeError or ValueError if invalid."""
    rows = [dict(zip(_COLUMNS, row, strict=True)) for row in file["tensors"]]

    def binding(index: Any) -> dict[str, Any]:
        if type(index) is not int or index < 0:
            raise ValueError(f"{index!r} is no number of a tensor")
        return rows[index]

    ops = [
        {**op, **{kind: {n: binding(i) for n, i in op[kind].items()} for kind in _BOUND}}
        for op in file["ops"]
    ]
    return {**{name: part for name, part in file.items() if name != "tensors"}, "ops": ops}
