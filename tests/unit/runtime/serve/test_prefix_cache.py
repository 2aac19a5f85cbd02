"""Prompts with a shared prefix: answers and metrics have the number of cached tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serve.served import served, toy_codec, worded
from toy_device import toy_cuda
from toy_engine import CACHING, toy_engine
from toy_plan import SHAPES

from specbuild.runtime.engine_dir.manifest import DraftShape

PROMPT = "abcdefghijklmnopqrst"


def ask(at: str, route: str, **body: Any) -> Any:
    answer = httpx.post(
        f"{at}/v1/{route}", json={"model": "toy", "max_tokens": 3, **body}, timeout=300
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


@pytest.mark.parametrize("kind", ["host", "device"])
def test_answers_have_the_number_of_cached_tokens(kind: str) -> None:
    # The toy's own draft is not a default one of the device.
    shapes = (*SHAPES, DraftShape(1, 2, 2))
    text = toy_codec("{% for m in messages %}{{ m.content }}{% endfor %}")
    if kind == "host":
        engine = toy_engine(CACHING, text=text)
    else:
        engine = toy_cuda(CACHING, text=text, shapes=shapes).engine
    chat = [{"role": "user", "content": PROMPT}]
    with served(engine) as (at, _):
        cold = ask(at, "completions", prompt=PROMPT, seed=1)
        warm = ask(at, "completions", prompt=PROMPT, seed=1)
        assert (cached(cold), cached(warm)) == (0, 16)
        assert warm["choices"] == cold["choices"]
        assert cached(ask(at, "chat/completions", messages=chat)) == 16
        assert cached(ask(at, "completions", prompt=PROMPT, cache_salt="mine")) == 0
        body = {"model": "toy", "input": PROMPT, "max_output_tokens": 3}
        response = httpx.post(f"{at}/v1/responses", json=body, timeout=300).json()
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 16
        metrics = httpx.get(f"{at}/metrics", timeout=300).text
    numbers = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if not line.startswith("#")
    }
    assert numbers["vllm:prefix_cache_queries_total"] == 5 * 20
    assert numbers["vllm:prefix_cache_hits_total"] == 3 * 16
    assert numbers["vllm:prompt_tokens_cached_total"] == 3 * 16


def test_rejects_a_salt_of_a_wrong_type() -> None:
    with served(worded()) as (at, _):
        body = {"model": "toy", "prompt": "abc", "cache_salt": 3}
        answer = httpx.post(f"{at}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"]
