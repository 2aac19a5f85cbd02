"""``specbuild bench server`` reports what the server did."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from serve.served import NAME, served, worded

from specbuild.cli.bench.server.client import Sample
from specbuild.cli.bench.server.load import LoadSettings, _report
from specbuild.cli.bench.server.report import LoadReport
from specbuild.cli.main import main


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(worded(), max_queue=64) as (address, _):
        yield address


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"id": "a", "prompt": "bcd"}, {"id": "b", "prompt_ids": [4, 5]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("how", [("--clients", "3"), ("--rate", "200")])
def test_reports_a_load(
    url: str, how: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "load.svg"
    arguments = ["--requests", "7", "--max-new-tokens", "9", "--prompts", str(prompts(tmp_path))]
    code = main(["bench", "server", url, *arguments, *how, "--json", "--plot", str(plot)])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == NAME and report["errors"] == 0
    assert report["requests"] == 7 and report["output_tokens"] == 63
    assert report["prompt_tokens"] == 4 * 3 + 3 * 2
    assert report["output_tokens_per_s"] == pytest.approx(63 / report["duration_s"])
    for name in ("ttft_s", "tpot_s", "gap_s", "worst_gap_s", "e2e_s"):
        spread = report[name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["worst"]
    assert plot.read_text().startswith("<?xml")


def test_counts_failed_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "server", url, "--requests", "2", "--model", "nobody"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["bench", "server", "http://127.0.0.1:9", "--requests", "2"]) == 2
    assert "names no model" in capsys.readouterr().err


def test_the_old_spelling_runs_the_command(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--server", url, "--requests", "1", "--prompts", str(prompts(tmp_path)), "--json"]
    assert main(["bench", *words, "--max-new-tokens", "4"]) == 0
    output = capsys.readouterr()
    assert output.err == "specbuild: warning: bench --server is deprecated; use bench server\n"
    assert json.loads(output.out)["requests"] == 1


def test_percentiles_are_computed_over_served_requests() -> None:
    good = [
        Sample(started_s=float(i), ended_s=i + 2.0, ttft_s=0.1 * i, gaps_s=(0.2, 0.3 * i),
               prompt_tokens=5, output_tokens=11)
        for i in range(1, 101)
    ]  # fmt: skip
    bad = Sample(started_s=0.0, ended_s=1.0, error="500: broken")
    settings = LoadSettings(requests=101)
    report: LoadReport = _report("here", "m", settings, [*good, bad])
    assert (report.requests, report.errors, report.first_error) == (101, 1, "500: broken")
    assert report.output_tokens == 1100 and report.duration_s == 102.0
    assert report.ttft_s is not None and report.ttft_s.p50 == pytest.approx(5.1)
    assert report.ttft_s.p99 == pytest.approx(10.0) and report.ttft_s.worst == pytest.approx(10.0)
    assert report.tpot_s is not None and report.tpot_s.mean == pytest.approx((2 - 5.05) / 10)
