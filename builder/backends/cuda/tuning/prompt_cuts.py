"""Cuts a prompt chunk into launches of other sizes, in which rows must have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec

MIN_ROWS = 64
# Pieces start at multiples of this, so that their tensors are aligned like those of the full chunk.
_ALIGNED_ROWS = 8


@dataclass(frozen=True)
class Piece:
    """Rows ``first … first + rows − 1`` of a launch, and the request for these rows."""

    first: int
    rows: int
    request: LoweringRequest


Cut: TypeAlias = tuple[Piece, ...]


def row_tensors(op: OpSpec, request: LoweringRequest) -> tuple[str, ...]:
    """Return the inputs and outputs with a row for every row of the results."""
    aliased = {output for output, _ in op.aliases}
    axis = next(spec.axes[0] for spec in op.outputs if spec.name not in aliased)
    specs = (*op.inputs, *op.outputs)
    return tuple(s.name for s in specs if s.name in request.tensors and s.axes[:1] == (axis,))


def cuts_of(op: OpSpec, request: LoweringRequest) -> tuple[Cut, ...]:
    """Return two cuts of a prompt's rows into three sizes; none for few or decode rows."""
    if request.phase == "decode":
        return ()
    names = row_tensors(op, request)
    rows = request.tensors[names[-1]].shape[0]
    if rows < MIN_ROWS or "page_table" in request.tensors:
        return ()
    large, small = (_ALIGNED_ROWS * (rows // part | 1) for part in (13, 48))
    last = rows - large - small
    return tuple(
        _pieces(request, names, sizes) for sizes in ((large, small, last), (small, large, last))
    )


def row_starts(full_starts: np.ndarray, piece: Piece) -> np.ndarray:
    """Return ``row_start`` [B + 1] of a piece from that of the full launch."""
    starts: np.ndarray = np.clip(full_starts - piece.first, 0, piece.rows).astype(np.int32)
    return starts


def _pieces(request: LoweringRequest, names: tuple[str, ...], sizes: tuple[int, ...]) -> Cut:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        Piece(first, rows, replace(request, tensors=_with_rows(request.tensors, names, rows)))
        for first, rows in zip(firsts, sizes, strict=True)
    )


def _with_rows(
    tensors: Mapping[str, TensorInfo], names: tuple[str, ...], rows: int
) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo((rows, *info.shape[1:]), info.dtype) if name in names else info
        for name, info in tensors.items()
    }
