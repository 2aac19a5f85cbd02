"""Choose against plain probabilities: Philox vectors, χ² over many draws, greedy rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from body_session import run_record
from forms import portable

from specbuild.plugins_cuda.choose import body as choose_body
from specbuild.plugins_cuda.choose import op as choose_op
from specbuild.plugins_cuda.choose.op import kept_tokens
from specbuild.plugins_cuda.registry import op_named

OP = op_named("Choose")
Run = Callable[[Sequence[np.ndarray]], tuple[np.ndarray, np.ndarray]]


def by_reference(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    choice, logprob = OP.reference(*map(torch.from_numpy, arrays))
    return choice.numpy(), logprob.numpy()


def by_body(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    choice, logprob = portable(OP, arrays, {})
    return choice, logprob


each_form = pytest.mark.parametrize("run", [by_reference, by_body])

# Known answers of Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_reference_philox_equals_published_vectors(counter: str, key: str, result: str) -> None:
    c, k = ([torch.tensor([w]) for w in words(text)] for text in (counter, key))
    assert [int(word) for word in choose_op.philox(c, k)] == words(result)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_body_philox_equals_published_vectors(counter: str, key: str, result: str) -> None:
    names = ["c0", "c1", "c2", "c3", "k0", "k1"]
    arrays = [np.array([word], np.uint64) for word in words(counter) + words(key)]
    outputs = run_record(names, arrays, lambda b, v: choose_body.philox(b, v[:4], v[4:]))
    assert [int(word[0]) for word in outputs] == words(result)


def rows_of(
    logits: Sequence[float],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 5,
    min_p: float = 0.0,
) -> list[np.ndarray]:
    """Repeat the logits at ``count`` positions."""
    return [
        np.tile(np.array(logits, np.float32), (count, 1)),
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
        np.full(count, seed, np.int32),
        np.arange(count, dtype=np.int32),
        np.full(count, temperature * math.log(min_p) if min_p else 0.0, np.float32),
    ]


def distribution(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Return the distribution after temperature, min-p, then top-k, then top-p over the rest."""
    weights = [math.exp(x / temperature) for x in logits]
    weights = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept = order[: top_k or len(order)]
    mass = sum(weights[v] for v in kept)
    nucleus, reached = [], 0.0
    for v in kept:
        if reached >= top_p and nucleus:
            break
        nucleus.append(v)
        reached += weights[v] / mass
    total = sum(weights[v] for v in nucleus)
    return [weights[v] / total if v in nucleus else 0.0 for v in range(len(logits))]


LOGITS = (0.3, 1.9, -1.0, 0.9, -0.2, 1.1, -2.5, 0.0, 1.5)


def chi_square_limit(freedom: int) -> float:
    """Return the value that χ² exceeds once in 100 000 draws (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3


@each_form
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 6, 0.7, 0.0),
        (1.5, 0, 1.0, 0.3),
        (1.5, 3, 1.0, 0.3),
        (1.5, 0, 0.7, 0.3),
        (1.5, 8, 0.99, 0.2),
    ],
)
@pytest.mark.parametrize("seed", [5, 2**31 - 1])
def test_draws_follow_the_distribution(
    run: Run, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    count = 20_000
    arrays = rows_of(
        LOGITS, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, min_p=min_p
    )
    counts = np.bincount(run(arrays)[0], minlength=len(LOGITS))
    expected = [count * p for p in distribution(LOGITS, temperature, top_k, top_p, min_p)]
    assert all(f == 0 for f, w in zip(counts, expected, strict=True) if w == 0)
    terms = [(f - w) ** 2 / w for f, w in zip(counts, expected, strict=True) if w > 0]
    assert sum(terms) < chi_square_limit(len(terms) - 1)


def test_chi_square_detects_a_wrong_temperature() -> None:
    count = 20_000
    counts = np.bincount(by_reference(rows_of(LOGITS, count, temperature=1.1))[0], minlength=9)
    expected = [count * p for p in distribution(LOGITS, 1.0, 0, 1.0, 0.0)]
    terms = [(f - w) ** 2 / w for f, w in zip(counts, expected, strict=True)]
    assert sum(terms) > chi_square_limit(len(terms) - 1)


@each_form
def test_noise_depends_on_seed_and_position_only(run: Run) -> None:
    arrays = rows_of(LOGITS, 64)
    whole = run(arrays)[0]
    shuffled = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(run([a[shuffled] for a in arrays])[0], whole[shuffled])
    np.testing.assert_array_equal(run([a[10:11] for a in arrays])[0], whole[10:11])
    arrays[1][::2] = 0
    np.testing.assert_array_equal(run(arrays)[0][1::2], whole[1::2])


@each_form
def test_other_seeds_and_positions_give_other_noise(run: Run) -> None:
    first = run(rows_of(LOGITS, 400, seed=1))[0]
    second = run(rows_of(LOGITS, 400, seed=2))[0]
    agree = float(np.mean(first == second))
    expected = sum(p * p for p in distribution(LOGITS, 1.0, 0, 1.0, 0.0))
    assert abs(agree - expected) < 0.12
    assert len(set(first.tolist())) > 5


@each_form
def test_greedy_selects_the_lowest_id_of_equal_logits(run: Run) -> None:
    logits = [1.0, 3.0, 2.0, 3.0, 3.0]
    arrays = rows_of(logits, 3, temperature=0.0, top_k=2, top_p=0.1)
    assert run(arrays)[0].tolist() == [1, 1, 1]


@each_form
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_logprob_is_computed_from_the_raw_logits(run: Run, temperature: float) -> None:
    arrays = rows_of(LOGITS, 50, temperature=temperature, top_k=5)
    choice, logprob = run(arrays)
    total = math.log(sum(math.exp(x) for x in LOGITS))
    expected = [LOGITS[v] - total for v in choice.tolist()]
    np.testing.assert_allclose(logprob, expected, atol=1e-5)


def test_a_top_p_of_1_keeps_tokens_whose_probability_rounds_to_0() -> None:
    scaled = torch.tensor([[60.0, 0.0, -60.0]])
    kept = kept_tokens(scaled, torch.tensor([0]), torch.tensor([1.0]))
    assert kept.all()


def test_a_top_p_of_0_keeps_the_best_token() -> None:
    kept = kept_tokens(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), torch.tensor([0.0]))
    assert kept.tolist() == [[False, True, False]]
