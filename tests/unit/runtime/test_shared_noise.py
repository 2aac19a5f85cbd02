"""Drafts sampled with the target's noise: their acceptance rate and their distribution.

The target's samples are those of the op Choose. The expected rate is computed from both full
distributions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coupled_draws import (
    coupled_rate,
    log_softmax,
    logits_pair,
    require_distribution,
    target_samples,
)

from specbuild.plugins_cuda.choose.op import gumbel_noise as noise_of_choose
from specbuild.runtime.draft.shared_noise import (
    CANDIDATES,
    TEMPERATURE_RATIO,
    SharedNoise,
    gumbel_noise,
)
from specbuild.runtime.sampling import SamplingParams

VOCAB, POSITIONS = 48, 6000


def likely(logits: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of ``expand``: candidates and log-probabilities, for equal rows."""
    log_q = log_softmax(logits)
    order = np.argsort(-log_q, kind="stable")[:CANDIDATES].astype(np.int32)
    return np.tile(order, (rows, 1)), np.tile(log_q[order], (rows, 1))


def shared(params: SamplingParams, rows: int = POSITIONS) -> SharedNoise:
    return SharedNoise((params,) * rows, np.arange(rows, dtype=np.int32))


def test_the_noise_equals_that_of_choose() -> None:
    seed, position = np.array([5, 2**31 - 1], np.int32), np.array([7, 130_000], np.int32)
    tokens = np.random.default_rng(0).integers(0, 5000, (2, 300)).astype(np.int32)
    expected = noise_of_choose(torch.from_numpy(seed), torch.from_numpy(position), 5000).numpy()
    found = gumbel_noise(seed, position, tokens)
    np.testing.assert_allclose(found, np.take_along_axis(expected, tokens, 1), atol=1e-5)


@pytest.mark.parametrize("error", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_draft_is_accepted_as_often_as_the_coupling_of_both_distributions_says(
    error: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=11)
    target, draft = logits_pair(3, error, VOCAB)
    proposed = shared(params).first(*likely(draft, POSITIONS))
    found = float(np.mean(proposed == target_samples(target, params, POSITIONS)))
    log_p = log_softmax(target / temperature)
    log_q = log_softmax(draft / (temperature * TEMPERATURE_RATIO))
    expected = coupled_rate(log_p, log_q)
    assert found == pytest.approx(expected, abs=4 * np.sqrt(0.25 / POSITIONS))
    variation = 1 - np.minimum(np.exp(log_p), np.exp(log_q)).sum()
    assert expected >= (1 - variation) / (1 + variation) - 1e-6


def test_drafted_tokens_have_the_distribution_of_the_draft() -> None:
    params = SamplingParams(temperature=0.9, seed=4)
    _, draft = logits_pair(8, 1.0, VOCAB)
    proposed = shared(params).first(*likely(draft, POSITIONS))
    require_distribution(proposed, log_softmax(draft / (0.9 * TEMPERATURE_RATIO)))


def test_children_are_the_best_perturbed_scores_with_the_chance_of_acceptance() -> None:
    """The probability is right on average if the draft has the assumed errors."""
    params, rows = SamplingParams(temperature=1.0, seed=2), 4000
    _, draft = logits_pair(5, 0.0, VOCAB)
    tokens, log_chance = shared(params, rows).best(*likely(draft, rows), 3)
    noise = noise_of_choose(torch.full((rows,), 2), torch.arange(rows), VOCAB).numpy()
    score = log_softmax(draft)[None] / TEMPERATURE_RATIO + noise
    assert np.array_equal(tokens, np.argsort(-score, axis=1)[:, :3])
    assert np.all(np.diff(log_chance, axis=1) <= 0) and np.all(log_chance <= 0)
    gumbel = np.random.default_rng(1).gumbel(size=score.shape)
    accepted = (score + gumbel).argmax(axis=1)
    for rank in range(3):
        found = np.mean(tokens[:, rank] == accepted)
        assert found == pytest.approx(np.exp(log_chance[:, rank]).mean(), abs=0.03)


def test_greedy_rows_of_a_mixed_batch_keep_their_tokens_and_scores() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, seed=3)
    noise = SharedNoise((greedy, sampled, greedy), np.array([4, 5, 6], np.int32))
    tokens, log_q = likely(logits_pair(1, 1.0, VOCAB)[1], 3)
    best, scores = noise.best(tokens, log_q, 4)
    assert np.array_equal(best[::2], tokens[::2, :4])
    assert np.array_equal(scores[::2], log_q[::2, :4])
    assert np.array_equal(noise.first(tokens, log_q)[::2], tokens[::2, 0])
    alone = SharedNoise((sampled,), np.array([5], np.int32))
    assert np.array_equal(best[1:2], alone.best(tokens[1:2], log_q[1:2], 4)[0])


@pytest.mark.parametrize(
    "cut", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}], ids=str
)
def test_tokens_that_the_request_cuts_are_not_proposed(cut: dict[str, float]) -> None:
    """A draft equal to the target proposes no token that the target may not sample."""
    params = SamplingParams(temperature=1.2, seed=6, **cut)  # type: ignore[arg-type]
    target, _ = logits_pair(9, 0.0, VOCAB)
    sampled = set(target_samples(target, params, POSITIONS).tolist())
    proposed = set(shared(params).first(*likely(target, POSITIONS)).tolist())
    assert proposed <= sampled


def test_a_nearly_certain_token_is_proposed_without_noise() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[17] = 12.0
    params = SamplingParams(temperature=1.0, seed=1)
    assert set(shared(params).first(*likely(logits, POSITIONS)).tolist()) == {17}
