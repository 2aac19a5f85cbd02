"""A server of an engine on several fake GPUs, one of which fails while requests run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_ranks import toy_ranks
from serve.served import NAME, served

COMPLETIONS = "/v1/completions"


def body(start: int) -> dict[str, object]:
    return {"model": NAME, "prompt": [start, 1, 2], "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fault_of_one_gpu_fails_requests_and_health(failing: int) -> None:
    """Running and later requests, and /health, return the message that names the GPU."""
    toy = toy_ranks(2)
    with served(toy.engine) as (url, _), httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health").status_code == 200
        assert client.post(COMPLETIONS, json=body(3)).status_code == 200
        metrics = client.get("/metrics").text
        assert "specbuild:ranks" in metrics
        toy.gpus[failing].fails_at = toy.gpus[failing].calls + 60
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda i: client.post(COMPLETIONS, json=body(i)), range(6)))
        failed = [answer for answer in answers if answer.status_code != 200]
        assert failed
        for answer in failed:
            assert answer.status_code in (500, 503)
            assert f"GPU {failing}: " in answer.text
        again = client.post(COMPLETIONS, json=body(4))
        assert again.status_code in (500, 503)
        health = client.get("/health")
        assert health.status_code == 503
        assert "the engine failed" in health.text
        assert f"GPU {failing}: " in health.text
