"""benchmarks/sampling_rules.py: acceptance against simulations, and levels of a text."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from script_modules import BENCHMARKS, load_script

DRAWS, TOKENS = 400_000, 7


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    return load_script(BENCHMARKS / "sampling_rules.py")


@pytest.fixture
def distributions() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    p, q = (generator.dirichlet(np.full(TOKENS, 0.7)) for _ in range(2))
    return p, q


def expected(rate: object, p: np.ndarray, q: np.ndarray) -> float:
    """Return the mean of a rate over the target's samples: Σ_x p_x · rate(x)."""
    rows = [torch.tensor(np.tile(t, (TOKENS, 1))) for t in (p, q)]
    return float((torch.tensor(p) * rate(*rows, torch.arange(TOKENS))).sum())  # type: ignore[operator]


def test_acceptance_with_shared_noise_equals_simulation(
    rules: ModuleType, distributions: tuple[np.ndarray, np.ndarray]
) -> None:
    p, q = distributions
    noise = np.random.default_rng(6).gumbel(size=(DRAWS, TOKENS))
    equal = (np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)
    error = 4 * (equal.mean() * (1 - equal.mean()) / DRAWS) ** 0.5
    assert expected(rules.shared_noise_rate, p, q) == pytest.approx(equal.mean(), abs=error)


def test_acceptance_with_rejection_is_the_overlap(
    rules: ModuleType, distributions: tuple[np.ndarray, np.ndarray]
) -> None:
    p, q = distributions
    assert expected(rules.rejection_rate, p, q) == pytest.approx(np.minimum(p, q).sum())
    assert expected(lambda _, b, x: rules.argmax_rate(b, x), p, q) == pytest.approx(p[q.argmax()])


def test_a_token_that_the_draft_does_not_have_is_never_accepted(rules: ModuleType) -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    x = torch.tensor([1])
    assert rules.shared_noise_rate(p, q, x) == 0 and rules.rejection_rate(p, q, x) == 0


def test_cuts_equal_those_of_a_request(rules: ModuleType) -> None:
    p = torch.tensor([[0.1, 0.5, 0.3, 0.06, 0.04]])
    assert torch.allclose(rules.Cut(top_p=0.8).of(p), torch.tensor([[0, 0.625, 0.375, 0, 0]]))
    assert torch.allclose(rules.Cut(min_p=0.15).of(p) > 0, p >= 0.075)
    assert torch.equal(rules.Cut().of(p), p / p.sum())


def test_candidates_are_the_most_likely_tokens(rules: ModuleType) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    tokens = rules.candidates(logits)
    for row, near in zip(logits, tokens, strict=True):
        finite = near.isfinite()
        assert finite.sum() == rules.CANDIDATES and torch.equal(near[finite], row[finite])
        assert row[finite].min() > row[~finite].max()
