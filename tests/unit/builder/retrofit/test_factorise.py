"""Factors of keys and values: exact at full rank, optimal below it, with ranks per layer."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.training.retrofit.factorise import (
    Importance,
    allocate_ranks,
    factors_of,
    spectrum_of,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skewed_moment(size: int, seed: int = 1) -> torch.Tensor:
    """Return the moment of inputs that mostly lie in a few directions."""
    x = drawn(4 * size, size, seed=seed) * torch.logspace(1, -2, size, dtype=torch.float64)
    x = x @ torch.linalg.qr(drawn(size, size, seed=seed + 1)).Q
    return x.T @ x / len(x)


def importance_of(hidden: int, kv_width: int) -> Importance:
    keys, values = drawn(40, kv_width, seed=5), drawn(40, kv_width, seed=7)
    return Importance(skewed_moment(hidden), keys.T @ keys, values.T @ values)


def counted(lost: torch.Tensor, importance: Importance) -> list[float]:
    """Return ``tr(E M Eᵀ C)`` of the keys and of the values, as a norm."""
    parts = zip(lost.chunk(2, dim=1), (importance.keys, importance.values), strict=True)
    return [float(torch.trace(e @ m @ e.T @ importance.inputs).sqrt()) for e, m in parts]


def relative_error(lost: torch.Tensor, weight: torch.Tensor, importance: Importance) -> float:
    """Return the error of keys and values together, each relative to its norm."""
    pairs = zip(counted(lost, importance), counted(weight, importance), strict=True)
    return sum((part / whole) ** 2 for part, whole in pairs) ** 0.5


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("hidden", "kv_width"), [(48, 12), (20, 16)])
def test_full_rank_is_exact(hidden: int, kv_width: int, calibrated: bool) -> None:
    weight = drawn(hidden, 2 * kv_width)
    weight[:, :kv_width] *= 40  # keys larger than values
    spectrum = spectrum_of(weight, importance_of(hidden, kv_width) if calibrated else None)
    factors = factors_of(weight, spectrum, min(hidden, 2 * kv_width))
    assert (factors.down @ factors.up - weight).norm() < 1e-13 * weight.norm()
    low = factors.down.float() @ factors.up.float() - weight.float()
    assert low.norm() < 4 * torch.finfo(torch.float32).eps * weight.norm()


@pytest.mark.parametrize("rank", [1, 5, 15])
def test_factors_have_the_least_weighted_error(rank: int) -> None:
    """By Eckart–Young, the minimum for whitened errors is the tail of the singular values."""
    weight, importance = drawn(30, 16), importance_of(30, 8)
    factors = factors_of(weight, spectrum_of(weight, importance), rank)
    result = relative_error(factors.down @ factors.up - weight, weight, importance)
    roots = [torch.linalg.cholesky(m) for m in (importance.keys, importance.values)]
    sizes = counted(weight, importance)
    parts = zip(weight.chunk(2, dim=1), roots, sizes, strict=True)
    whitened = torch.cat([part @ root / size for part, root, size in parts], dim=1)
    tail = torch.linalg.svdvals(torch.linalg.cholesky(importance.inputs).T @ whitened)[rank:]
    assert result == pytest.approx(float(tail.norm()), rel=2e-2)
    plain = factors_of(weight, spectrum_of(weight, None), rank)
    assert relative_error(plain.down @ plain.up - weight, weight, importance) > 1.05 * result


def test_large_keys_do_not_dominate_small_values() -> None:
    weight = drawn(40, 16)
    weight[:, :8] *= 1000
    factors = factors_of(weight, spectrum_of(weight, None), 8)
    lost = factors.down @ factors.up - weight
    parts = zip(lost.chunk(2, 1), weight.chunk(2, 1), strict=True)
    shares = [float(part.norm() / whole.norm()) for part, whole in parts]
    assert max(shares) < 0.8


def lost_energy(spectra: list[torch.Tensor], ranks: tuple[int, ...]) -> float:
    shares = [v.square() / v.square().sum() for v in spectra]
    return sum(float(s[rank:].sum()) for s, rank in zip(shares, ranks, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_ranks_minimize_the_lost_energy(layers: int, mean: int, seed: int) -> None:
    spectra = [drawn(5, seed=seed + i).exp().sort(descending=True).values for i in range(layers)]
    ranks = allocate_ranks(spectra, mean)
    assert sum(ranks) == mean * layers
    choices = [r for r in product(range(1, 6), repeat=layers) if sum(r) == mean * layers]
    best = min(lost_energy(spectra, choice) for choice in choices)
    assert lost_energy(spectra, ranks) == pytest.approx(best, abs=1e-12)


def test_ranks_are_multiples_of_a_step_if_their_mean_is() -> None:
    spectra = [drawn(64, seed=i).abs().sort(descending=True).values ** (i + 1) for i in range(6)]
    ranks = allocate_ranks(spectra, 24)
    assert sum(ranks) == 6 * 24 and all(rank % 8 == 0 and rank > 0 for rank in ranks)
    assert len(set(ranks)) > 1
    assert allocate_ranks(spectra, 64) == (64,) * 6
