"""Clients whose prompts begin alike: what was cached is in their answers and in the metrics."""

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


def asked(at: str, route: str, **body: Any) -> Any:
    answer = httpx.post(
        f"{at}/v1/{route}", json={"model": "toy", "max_tokens": 3, **body}, timeout=300
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("kind", ["host", "device"])
def test_answers_say_how_much_of_a_prompt_was_cached(kind: str) -> None:
    # The toy's own draft is none of the device's usual ones.
    shapes = (*SHAPES, DraftShape(1, 2, 2))
    text = toy_codec("{% for m in messages %}{{ m.content }}{% endfor %}")
    if kind == "host":
        engine = toy_engine(CACHING, text=text)
    else:
        engine = toy_cuda(CACHING, text=text, shapes=shapes).engine
    chat = [{"role": "user", "content": PROMPT}]
    with served(engine) as (at, _):
        cold = asked(at, "completions", prompt=PROMPT, seed=1)
        warm = asked(at, "completions", prompt=PROMPT, seed=1)
        assert (cached(cold), cached(warm)) == (0, 16)
        assert warm["choices"] == cold["choices"]
        assert cached(asked(at, "chat/completions", messages=chat)) == 16
        assert cached(asked(at, "completions", prompt=PROMPT, cache_salt="mine")) == 0
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


def test_a_salt_of_a_wrong_type_is_refused_by_name() -> None:
    with served(worded()) as (at, _):
        body = {"model": "toy", "prompt": "abc", "cache_salt": 3}
        answer = httpx.post(f"{at}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"]
