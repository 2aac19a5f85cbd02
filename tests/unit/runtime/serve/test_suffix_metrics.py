"""Metrics of suffix decoding: proposals, and the texts in its cache."""

from __future__ import annotations

import httpx
from serve.served import served, worded

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape


def numbers(at: str) -> dict[str, float]:
    text = httpx.get(f"{at}/metrics", timeout=300).text
    return {
        line.split("{")[0].removeprefix("specbuild:suffix_"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("specbuild:suffix_") and "_created" not in line
    }


def test_metrics_count_proposals_and_cached_texts() -> None:
    record = SuffixRecord(cache_max_depth=6, max_tokens=4, min_token_prob=0.0, cached_tokens=60)
    engine = worded(drafted=False, suffix=record)
    body = {"model": "toy", "max_tokens": 20, "prompt": "abcab", "seed": 1, "ignore_eos": True}
    with served(engine, setting=DraftSetting(DraftShape(1, 4, 4), "suffix")) as (at, _):
        answers = []
        for count in (1, 2, 3):
            answer = httpx.post(f"{at}/v1/completions", json=body, timeout=300).json()
            answers.append(answer["choices"][0]["text"])
            metrics = numbers(at)
            length = 5 + answer["usage"]["completion_tokens"] + 1
            assert metrics["cache_tokens"] == length * min(count, 60 // length)
            assert metrics["cache_evicted_tokens_total"] == length * max(count - 60 // length, 0)
        assert len(set(answers)) == 1
        assert 0 <= metrics["accepted_tokens_total"] <= metrics["proposed_tokens_total"]
