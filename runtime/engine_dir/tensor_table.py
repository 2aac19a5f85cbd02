"""The form of a program's file: a tensor that many ops have stands once, in a table.

It is JSON of ``plan.Program`` with ``tensors`` in front: rows of buffer, offset, shape and element
type. The ops' inputs and outputs are numbers of rows. A file is read before its program is
recorded, and half of the time went by for tensors that stood there again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = ("buffer", "offset", "shape", "dtype")
_BOUND = ("inputs", "outputs")


def with_table(program: Mapping[str, Any]) -> dict[str, Any]:
    """A program's decoded JSON in the form of its file."""
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
    """The program's JSON of what its file holds. LookupError, TypeError or ValueError for none."""
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
