"""The metrics that the shipped dashboard names are those that a server exports."""

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
from specbuild.runtime.engine_dir.manifest import DraftShape

PROMPTS, TOKENS = ("abcdefghijklmnopqrst", "bb", "cab"), (20, 7, 30)
CHAIN = DraftShape(1, 3, 3)
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


def counted(engine: Engine, shape: DraftShape) -> dict[str, float]:
    """What a server counts while it answers the prompts, one after another."""
    with (
        served(engine, setting=DraftSetting(shape)) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
            body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == tokens
        exported = client.get("/metrics").text
    found = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", exported, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("shape", [CHAIN, DraftShape(3, 4, 12)])
def test_launches_and_drafts_are_counted_as_the_target_ran(shape: DraftShape) -> None:
    """A step's rows are, for each sequence, its root and its drafts."""
    engine = toy_engine(text=toy_codec())
    found = counted(engine, shape)
    rows = [rows for role, rows in engine.executor.launches if role == "target"]
    read = sum(len(prompt) for prompt in PROMPTS)
    assert found["iteration_tokens_total_count"] == len(rows)
    assert found["iteration_tokens_total_sum"] == read + sum(TOKENS)
    drafted = sum(rows) - read - found["spec_decode_num_drafts_total"]
    assert found["spec_decode_num_draft_tokens_total"] == drafted
    assert drafted > found["spec_decode_num_accepted_tokens_total"] > 0


def test_a_devices_launches_and_drafts_are_counted_as_the_hosts() -> None:
    """Of chains; a step that was started for nobody is received by nobody."""
    text = toy_codec()
    host, device = (
        counted(engine, CHAIN) for engine in (toy_engine(text=text), toy_cuda(text=text).engine)
    )
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert device[f"spec_decode_{name}_total"] == host[f"spec_decode_{name}_total"]
    for name in ("iteration_tokens_total_count", "iteration_tokens_total_sum"):
        assert device[name] == host[name]
