"""Low-rank factors of a layer's key and value projections, and the ranks of layers.

``W = [W_k | W_v]`` [H, 2·kv_width] maps normed inputs x to keys and values. Let ``C = E[x xᵀ]`` be
the second moment of the inputs, and ``e M eᵀ`` the cost of an error e of keys and values. The best
W' of rank r is ``W L V (L V)⁺``, where ``M = L Lᵀ`` and V are the first r right singular vectors of
``C^½ W L``. ``C = M = I`` gives the plain SVD. Keys and values are first scaled to one size, so
that the larger of both does not use the full rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Added to C, relative to its mean eigenvalue, for directions that the text does not have.
_RIDGE = 1e-6
# Added to M, because queries and output projections only estimate the weight of a direction.
_METRIC_RIDGE = 1e-3
# Ranks are multiples of this, which suits kernel tiles, if the mean rank is one.
RANK_STEP = 8


@dataclass(frozen=True)
class Importance:
    """A layer's weights: ``inputs`` C [H, H], ``keys`` and ``values`` [kv_width, kv_width]."""

    inputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Spectrum:
    """The singular values and directions of a layer, from which its factors follow.

    ``values`` [n] are the singular values of ``C^½ W L`` with keys and values of one size, in
    descending order. ``directions`` [2·kv_width, n] are their right vectors. ``even``
    [2·kv_width, 2·kv_width] is L times the scales of keys and values, lower triangular.
    """

    values: torch.Tensor
    directions: torch.Tensor
    even: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """``down`` [H, r], and ``up`` [r, 2·kv_width], whose first half gives the keys; fp64."""

    down: torch.Tensor
    up: torch.Tensor


def spectrum_of(weight: torch.Tensor, importance: Importance | None) -> Spectrum:
    """Return the spectrum of ``weight`` [H, 2·kv_width]; without importance all count equally."""
    weight = weight.double()
    half = weight.shape[1] // 2
    metric_root = torch.eye(2 * half, dtype=torch.float64)
    weighted = weight
    if importance is not None:
        metric_root = torch.block_diag(_lower(importance.keys), _lower(importance.values))
        weighted = _root(importance.inputs) @ weight @ metric_root
    sizes = torch.stack([part.norm() for part in weighted.split(half, dim=1)])
    scale = (1.0 / sizes.clamp(min=torch.finfo(torch.float64).tiny)).repeat_interleave(half)
    _, values, rows = torch.linalg.svd(weighted * scale, full_matrices=False)
    return Spectrum(values, rows.T.contiguous(), metric_root * scale)


def factors_of(weight: torch.Tensor, spectrum: Spectrum, rank: int) -> Factors:
    """Return the factors of rank ``rank`` of ``weight`` [H, 2·kv_width]."""
    directions = spectrum.directions[:, :rank]
    up = torch.linalg.solve_triangular(spectrum.even, directions.T, upper=False, left=False)
    return Factors(down=weight.double() @ spectrum.even @ directions, up=up)


def allocate_ranks(spectra: Sequence[torch.Tensor], mean_rank: int) -> tuple[int, ...]:
    """Return a rank per layer with this mean, which minimizes the energy lost over all layers.

    ``spectra`` are the layers' singular values in descending order. A layer's energy is relative to
    its total. A greedy choice is optimal, because the gain of a further rank falls with the rank.
    """
    step = RANK_STEP if mean_rank % RANK_STEP == 0 else 1
    energies = [(values.square() / values.square().sum()).tolist() for values in spectra]
    ranks = [step] * len(energies)

    def gain(layer: int) -> float:
        return sum(energies[layer][ranks[layer] : ranks[layer] + step])

    queue = [(-gain(layer), layer) for layer, e in enumerate(energies) if ranks[layer] < len(e)]
    heapq.heapify(queue)
    for _ in range((mean_rank // step - 1) * len(energies)):
        _, layer = heapq.heappop(queue)
        ranks[layer] = min(ranks[layer] + step, len(energies[layer]))
        if ranks[layer] < len(energies[layer]):
            heapq.heappush(queue, (-gain(layer), layer))
    return tuple(ranks)


def _root(moment: torch.Tensor) -> torch.Tensor:
    """Return a square root of ``moment`` plus the ridge: R with RᵀR = C."""
    ridge = _RIDGE * moment.diagonal().mean()
    values, vectors = torch.linalg.eigh(moment)
    return (values.clamp(min=0) + ridge).sqrt().unsqueeze(1) * vectors.T


def _lower(metric: torch.Tensor) -> torch.Tensor:
    """Return the Cholesky factor of ``metric`` plus its ridge: L with L Lᵀ = M."""
    ridge = _METRIC_RIDGE * metric.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.linalg.cholesky(metric + ridge * torch.eye(len(metric), dtype=metric.dtype))
