"""Packed gate and up projections: a tile has 8 gate rows, then the 8 matching up rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.linear.packing import HALF_ROWS, pack_rows, unpack_rows
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    import torch


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Pack ``gate`` and ``up`` [I, K] to [2I/16, K/32, 512], so that a lane has row i of both.

    Raises SpecbuildError if I is no multiple of 8.
    """
    return pack_rows(join_gate_up(gate, up))


def join_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Join rows ``gate`` and ``up`` [I, …] to [2I, …], in the order of the packed rows.

    Raises SpecbuildError if I is no multiple of 8.
    """
    import torch

    inner, *width = gate.shape
    if inner % HALF_ROWS:
        raise SpecbuildError(
            f"an MLP of {inner} rows cannot be packed: expected a multiple of {HALF_ROWS}; build "
            "for the cpu backend"
        )
    halves = [part.reshape(-1, 1, HALF_ROWS, *width) for part in (gate, up)]
    return torch.cat(halves, dim=1).reshape(2 * inner, *width)


def unpack_gate_up(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert :func:`pack_gate_up`."""
    rows = unpack_rows(packed)
    halves = rows.reshape(-1, 2, HALF_ROWS, rows.shape[1])
    return halves[:, 0].reshape(-1, rows.shape[1]), halves[:, 1].reshape(-1, rows.shape[1])


def unpack_gate_up_bias(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert :func:`join_gate_up` for biases."""
    halves = bias.reshape(-1, 2, HALF_ROWS)
    return halves[:, 0].flatten(), halves[:, 1].flatten()
