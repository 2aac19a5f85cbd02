"""The metrics that the shipped dashboard names are those that a server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from serve.served import NAME, served, worded

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine_dir.manifest import DraftShape

DASHBOARD = Path(__file__).parents[4] / "examples" / "grafana" / "specbuild.json"


def test_every_metric_of_the_dashboard_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [str(entry["query"]) for entry in dashboard["templating"]["list"]]
    named = set(re.findall(r"(?:vllm|specbuild):\w+", " ".join(asked)))
    with (
        served(worded(), setting=DraftSetting(DraftShape(3, 4, 12))) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        client.post("/v1/completions", json={"model": NAME, "prompt": "bb", "max_tokens": 20})
        exported = client.get("/metrics").text
    samples = set(re.findall(r"^([\w:]+)\{", exported, re.MULTILINE))
    assert len(named) > 10 and named <= samples
    labels = set(re.findall(r"by \((\w+)\)", " ".join(asked)))
    assert labels <= set(re.findall(r'(\w+)="', exported))


def test_the_parts_of_a_requests_time_are_the_whole() -> None:
    """Of more requests than run together: some of their time goes by in the queue."""
    engine = worded(max_seq_len=4096)
    prompts = ["b"] * (2 * engine.manifest.limits.max_batch_size)
    body = {"model": NAME, "prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    with served(engine) as (url, _), httpx.Client(base_url=url, timeout=300) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        exported = client.get("/metrics").text
    found = dict(
        re.findall(r"^vllm:(\w+_seconds_(?:sum|count))\{.*\} (\S+)$", exported, re.MULTILINE)
    )
    parts = ("queue", "prefill", "decode", "inference")
    sums = {part: float(found[f"request_{part}_time_seconds_sum"]) for part in parts}
    assert {float(found[f"request_{part}_time_seconds_count"]) for part in parts} == {len(prompts)}
    assert sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
    whole_s = float(found["e2e_request_latency_seconds_sum"])
    assert sums["queue"] + sums["inference"] == pytest.approx(whole_s)
    # Half of them wait until others are done.
    assert sums["queue"] > sums["inference"] / 4
