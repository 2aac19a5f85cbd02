"""A prompt chunk cut into launches of other sizes: rows owe the bits that they have together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec

FEWEST_ROWS = 64
# Pieces begin at such multiples, so that every tensor of them is as aligned as the whole one.
_ALIGNED_ROWS = 8


@dataclass(frozen=True)
class Piece:
    """Rows ``first … first + rows − 1`` of a launch, and the request of these alone."""

    first: int
    rows: int
    request: LoweringRequest


Cut: TypeAlias = tuple[Piece, ...]


def row_tensors(op: OpSpec, request: LoweringRequest) -> tuple[str, ...]:
    """The inputs and outputs that have a row for every row of the results."""
    written = {output for output, _ in op.aliases}
    axis = next(spec.axes[0] for spec in op.outputs if spec.name not in written)
    specs = (*op.inputs, *op.outputs)
    return tuple(s.name for s in specs if s.name in request.tensors and s.axes[:1] == (axis,))


def cuts_of(op: OpSpec, request: LoweringRequest) -> tuple[Cut, ...]:
    """Two cuts of a prompt's rows into three sizes; none of few rows, or of rows that decode."""
    if request.phase == "decode":
        return ()
    names = row_tensors(op, request)
    rows = request.tensors[names[-1]].shape[0]
    if rows < FEWEST_ROWS or "page_table" in request.tensors:
        return ()
    large, small = (_ALIGNED_ROWS * (rows // part | 1) for part in (13, 48))
    last = rows - large - small
    return tuple(
        _pieces(request, names, sizes) for sizes in ((large, small, last), (small, large, last))
    )


def row_starts(whole: np.ndarray, piece: Piece) -> np.ndarray:
    """``row_start`` [B + 1] of a piece, by that of the whole launch."""
    starts: np.ndarray = np.clip(whole - piece.first, 0, piece.rows).astype(np.int32)
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
