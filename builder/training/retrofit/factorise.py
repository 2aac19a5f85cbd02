"""Low-rank factors of a layer's key and value projections, and how ranks are allotted to layers.

``W = [W_k | W_v]`` [H, 2·kv_width] maps normed inputs x to keys and values. With inputs of second
moment ``C = E[x xᵀ]``, and errors e of keys and values that count ``e M eᵀ``, the best W' of rank r
is ``W L V (L V)⁺``, where ``M = L Lᵀ`` and V are the first r right singular vectors of ``C^½ W L``;
``C = M = I`` gives the plain SVD. Keys and values are first scaled to one size, so that the larger
of the two does not take all of the rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Added to C, relative to its mean eigenvalue: directions that the text never showed still count.
_RIDGE = 1e-6
# Added to M: a query or an output projection that ignores a direction is only an estimate.
_METRIC_RIDGE = 1e-3
# Ranks come in steps of this many, which suits tiles of kernels, where the mean rank does too.
RANK_STEP = 8


@dataclass(frozen=True)
class Importance:
    """What counts of a layer: ``inputs`` C [H, H], ``keys`` and ``values`` [kv_width, kv_width]."""

    inputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Spectrum:
    """What is kept of a layer between finding its directions and writing its factors.

    ``values`` [n], falling, are the singular values of ``C^½ W L`` with keys and values at one
    size; ``directions`` [2·kv_width, n] their right vectors; ``even`` [2·kv_width, 2·kv_width] is
    L with the factors that made the sizes one, lower triangular.
    """

    values: torch.Tensor
    directions: torch.Tensor
    even: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """``down`` [H, r], and ``up`` [r, 2·kv_width] whose first half makes the keys; fp64."""

    down: torch.Tensor
    up: torch.Tensor


def spectrum_of(weight: torch.Tensor, importance: Importance | None) -> Spectrum:
    """The directions of ``weight`` [H, 2·kv_width], by importance; None counts all alike."""
    weight = weight.double()
    half = weight.shape[1] // 2
    even = torch.eye(2 * half, dtype=torch.float64)
    seen = weight
    if importance is not None:
        even = torch.block_diag(_lower(importance.keys), _lower(importance.values))
        seen = _root(importance.inputs) @ weight @ even
    sizes = torch.stack([part.norm() for part in seen.split(half, dim=1)])
    scale = (1.0 / sizes.clamp(min=torch.finfo(torch.float64).tiny)).repeat_interleave(half)
    _, values, rows = torch.linalg.svd(seen * scale, full_matrices=False)
    return Spectrum(values, rows.T.contiguous(), even * scale)


def factors_of(weight: torch.Tensor, spectrum: Spectrum, rank: int) -> Factors:
    """The factors of rank ``rank`` of ``weight`` [H, 2·kv_width]."""
    chosen = spectrum.directions[:, :rank]
    up = torch.linalg.solve_triangular(spectrum.even, chosen.T, upper=False, left=False)
    return Factors(down=weight.double() @ spectrum.even @ chosen, up=up)


def allotted_ranks(spectra: Sequence[torch.Tensor], mean_rank: int) -> tuple[int, ...]:
    """A rank per layer with this mean, so that the energy lost over all layers is least.

    ``spectra`` are the layers' singular values, falling. Every layer counts by its share of its own
    energy. Greedy is optimal: what a further rank gains falls with the rank.
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
    """A square root of ``moment`` plus the ridge: R with RᵀR = C."""
    ridge = _RIDGE * moment.diagonal().mean()
    values, vectors = torch.linalg.eigh(moment)
    return (values.clamp(min=0) + ridge).sqrt().unsqueeze(1) * vectors.T


def _lower(metric: torch.Tensor) -> torch.Tensor:
    """The Cholesky factor of ``metric`` plus its ridge: L with L Lᵀ = M."""
    ridge = _METRIC_RIDGE * metric.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.linalg.cholesky(metric + ridge * torch.eye(len(metric), dtype=metric.dtype))
