"""The metrics that the shipped dashboard names are those that a server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
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
