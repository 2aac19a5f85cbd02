"""Metrics of a server: those of the shipped dashboard, latencies, launches and drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from serve.served import NAME, served, toy_codec, worded
from toy_device import toy_cuda
from toy_engine import toy_engine

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape

PROMPTS, TOKENS = ("abcdefghijklmnopqrst", "bb", "cab"), (20, 7, 30)
CHAIN = DraftShape(1, 3, 3)
DASHBOARD = Path(__file__).parents[4] / "examples" / "grafana" / "specbuild.json"


def test_every_metric_of_the_dashboard_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [str(entry["query"]) for entry in dashboard["templating"]["list"]]
    named = set(re.findall(r"(?:vllm|specbuild):\w+", " ".join(queries)))
    with (
        served(worded(), setting=DraftSetting(DraftShape(3, 4, 12))) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        client.post("/v1/completions", json={"model": NAME, "prompt": "bb", "max_tokens": 20})
        exported = client.get("/metrics").text
    samples = set(re.findall(r"^([\w:]+)\{", exported, re.MULTILINE))
    assert len(named) > 10 and named <= samples
    labels = set(re.findall(r"by \((\w+)\)", " ".join(queries)))
    assert labels <= set(re.findall(r'(\w+)="', exported))


def test_the_parts_of_the_latency_add_up() -> None:
    """There are more requests than run at once, so some of their time is spent in the queue."""
    engine = worded(max_seq_len=4096)
    prompts = ["b"] * (2 * engine.manifest.limits.max_batch_size)
    body = {"model": NAME, "prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    with served(engine) as (url, _), httpx.Client(base_url=url, timeout=300) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        exported = client.get("/metrics").text
    metrics = dict(
        re.findall(r"^vllm:(\w+_seconds_(?:sum|count))\{.*\} (\S+)$", exported, re.MULTILINE)
    )
    parts = ("queue", "prefill", "decode", "inference")
    sums = {part: float(metrics[f"request_{part}_time_seconds_sum"]) for part in parts}
    assert {float(metrics[f"request_{part}_time_seconds_count"]) for part in parts} == {
        len(prompts)
    }
    assert sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
    whole_s = float(metrics["e2e_request_latency_seconds_sum"])
    assert sums["queue"] + sums["inference"] == pytest.approx(whole_s)
    # Half of the requests wait until others have finished.
    assert sums["queue"] > sums["inference"] / 4


def counted(engine: Engine, shape: DraftShape) -> dict[str, float]:
    """Return the metrics of a server after it answered the prompts one after another."""
    with (
        served(engine, setting=DraftSetting(shape)) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
            body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == tokens
        exported = client.get("/metrics").text
    samples = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", exported, re.MULTILINE)
    return {name: float(value) for name, value in samples}


@pytest.mark.parametrize("shape", [CHAIN, DraftShape(3, 4, 12)])
def test_counts_of_launches_and_drafts_equal_those_of_the_target(shape: DraftShape) -> None:
    """In a step, each sequence has its root and its draft tokens as rows."""
    engine = toy_engine(text=toy_codec())
    metrics = counted(engine, shape)
    rows = [rows for role, rows in engine.executor.launches if role == "target"]
    read = sum(len(prompt) for prompt in PROMPTS)
    assert metrics["iteration_tokens_total_count"] == len(rows)
    assert metrics["iteration_tokens_total_sum"] == read + sum(TOKENS)
    drafted = sum(rows) - read - metrics["spec_decode_num_drafts_total"]
    assert metrics["spec_decode_num_draft_tokens_total"] == drafted
    assert drafted > metrics["spec_decode_num_accepted_tokens_total"] > 0


def test_a_device_engine_has_the_counts_of_the_host_engine() -> None:
    """Use chains. The device may start a step whose sequences have finished; it is not counted."""
    text = toy_codec()
    host, device = (
        counted(engine, CHAIN) for engine in (toy_engine(text=text), toy_cuda(text=text).engine)
    )
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert device[f"spec_decode_{name}_total"] == host[f"spec_decode_{name}_total"]
    for name in ("iteration_tokens_total_count", "iteration_tokens_total_sum"):
        assert device[name] == host[name]


def suffix_metrics(at: str) -> dict[str, float]:
    """Return the metrics of suffix decoding by name."""
    text = httpx.get(f"{at}/metrics", timeout=300).text
    return {
        line.split("{")[0].removeprefix("specbuild:suffix_"): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("specbuild:suffix_") and "_created" not in line
    }


def test_suffix_metrics_count_proposals_and_cached_texts() -> None:
    record = SuffixRecord(cache_max_depth=6, max_tokens=4, min_token_prob=0.0, cached_tokens=60)
    engine = worded(drafted=False, suffix=record)
    body = {"model": "toy", "max_tokens": 20, "prompt": "abcab", "seed": 1, "ignore_eos": True}
    with served(engine, setting=DraftSetting(DraftShape(1, 4, 4), "suffix")) as (at, _):
        answers = []
        for count in (1, 2, 3):
            answer = httpx.post(f"{at}/v1/completions", json=body, timeout=300).json()
            answers.append(answer["choices"][0]["text"])
            metrics = suffix_metrics(at)
            length = 5 + answer["usage"]["completion_tokens"] + 1
            assert metrics["cache_tokens"] == length * min(count, 60 // length)
            assert metrics["cache_evicted_tokens_total"] == length * max(count - 60 // length, 0)
        assert len(set(answers)) == 1
        assert 0 <= metrics["accepted_tokens_total"] <= metrics["proposed_tokens_total"]
