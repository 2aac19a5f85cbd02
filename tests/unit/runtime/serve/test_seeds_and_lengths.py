"""Seeds of 64 bits, and numbers of tokens that do not fit into the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.served import NAME, TEMPLATE, served, worded
from serve.test_bad_input import CHAT, COMPLETIONS
from serve.test_routes import text_of
from toy_model import decode_plainly

from specbuild.runtime.errors import RequestError
from specbuild.runtime.sampling import (
    MAX_NOISE_SEED,
    MAX_SEED,
    MIN_SEED,
    SamplingParams,
    choice_seed,
    sampling_feeds,
)

CONTEXT = 64
SEEDS = st.integers(MIN_SEED, MAX_SEED)
LARGE = (-1, MIN_SEED, 2**31, 2**31 + 7, 2**32, 2**32 + 7, 2**63 - 1, 2**63, MAX_SEED)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served(worded(TEMPLATE)) as (url, _), httpx.Client(base_url=url, timeout=300) as client:
        yield client


@given(st.integers(0, MAX_NOISE_SEED))
def test_seeds_of_31_bits_are_used_unchanged(seed: int) -> None:
    assert SamplingParams(seed=seed).noise_seed == seed


@given(SEEDS)
def test_every_64_bit_seed_maps_to_a_31_bit_seed(seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    assert 0 <= params.noise_seed <= MAX_NOISE_SEED
    assert sampling_feeds((params,), (2,))["seed"].tolist() == [params.noise_seed] * 2


@given(st.integers(2**64) | st.integers(max_value=MIN_SEED - 1))
def test_rejects_invalid_seeds(seed: int) -> None:
    with pytest.raises(RequestError, match="must be -2\\^63 to 2\\^64 - 1"):
        SamplingParams(seed=seed)


def test_large_seeds_differ_from_their_low_bits() -> None:
    """Regression: seeds were reduced modulo 2^31.

    The expected values fix the noise of each seed.
    """
    noise = [SamplingParams(seed=seed).noise_seed for seed in LARGE]
    assert len(set(noise)) == len(LARGE) and not {0, 7, MAX_NOISE_SEED} & set(noise)
    assert noise[0] == 2071120938
    many = {SamplingParams(seed=2**40 + i).noise_seed for i in range(2000)}
    assert len(many) >= 1999


@given(SEEDS, st.integers(0, 127), st.integers(0, 127))
def test_choices_of_a_request_have_different_seeds(seed: int, one: int, other: int) -> None:
    seeds = choice_seed(seed, one), choice_seed(seed, other)
    assert (seeds[0] == seeds[1]) == (one == other)
    assert choice_seed(seed, 0) == seed
    assert all(MIN_SEED <= each <= MAX_SEED for each in seeds)
    if 0 <= seed <= MAX_NOISE_SEED:
        assert seeds[0] == (seed + one * 0x9E3779B1) % 2**31


@pytest.mark.parametrize("seed", [0, 7, *LARGE])
def test_a_server_uses_the_seed_of_a_request(client: httpx.Client, seed: int) -> None:
    body = {"model": NAME, "prompt": "b", "max_tokens": 16, "temperature": 1.0, "seed": seed}
    answer = client.post(COMPLETIONS, json=body | {"n": 2})
    texts = [choice["text"] for choice in answer.json()["choices"]]
    sampling = [SamplingParams(temperature=1.0, seed=choice_seed(seed, i)) for i in range(2)]
    assert texts == [text_of(decode_plainly([1], 16, each)) for each in sampling]


@pytest.mark.parametrize("seed", [2**64, MIN_SEED - 1, 10**40, 1.5, "1"])
def test_a_server_rejects_invalid_seeds(client: httpx.Client, seed: Any) -> None:
    for path, text in ((COMPLETIONS, {"prompt": "b"}), ("/v1/responses", {"input": "b"})):
        answer = client.post(path, json={"model": NAME, "seed": seed, **text})
        assert answer.status_code == 400 and "seed" in answer.json()["error"]["message"]


USER = {"messages": [{"role": "user", "content": "bcd"}]}


@pytest.mark.parametrize(
    ("path", "body", "field", "prompt"),
    [
        (COMPLETIONS, {"prompt": ["b", "bcd"]}, "max_tokens", 3),
        (CHAT, USER, "max_tokens", 4),
        (CHAT, USER, "max_completion_tokens", 4),
        ("/v1/responses", {"input": "bcd"}, "max_output_tokens", 4),
    ],
)
def test_rejects_max_tokens_beyond_the_context(
    client: httpx.Client, path: str, body: dict[str, Any], field: str, prompt: int
) -> None:
    fits = CONTEXT - prompt
    for tokens, status in ((fits + 1, 400), (10**6, 400), (fits, 200), (None, 200)):
        answer = client.post(path, json={"model": NAME, field: tokens, **body})
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"{prompt} in the prompt and {tokens} in the completion" in error["message"]


def test_the_default_max_tokens_of_completions_fits_the_context(client: httpx.Client) -> None:
    """A client that states no number gets as many tokens as fit."""
    body = {"model": NAME, "prompt": [1] * (CONTEXT - 2), "ignore_eos": True}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert client.post(COMPLETIONS, json=body | {"max_tokens": 16}).status_code == 400


def test_text_parts_are_joined_by_newlines(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "cd"}]
    for content in (parts, "b\ncd"):
        tokens = {"messages": [{"role": "user", "content": content}]}
        tokens_of_text = client.post("/tokenize", json=tokens).json()["tokens"]
        assert tokens_of_text[:4] == [1, 0, 2, 3]  # the toy's tokenizer maps a newline to "a"
