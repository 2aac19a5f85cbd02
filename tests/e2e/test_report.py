"""``specbuild report``: one page whose figures equal those of the records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browser import browser, needs_chromium
from command_line import Command
from report_page import ReportPage

from specbuild.builder.verify.report import LosslessRow, VerifyReport, VerifyRow
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.device_costs import ShapeCosts
from specbuild.runtime.engine_dir.strict_json import to_json
from specbuild.runtime.measure.serving.costs import ServingCosts

SWEEP = Path(__file__).parents[2] / "benchmarks/results/h200-2026-11-23/20b-steps.json"
HOSTILE = '"><script>alert(1)</script>\u202e\x07'

Report = Callable[..., ReportPage]


@pytest.fixture
def report(command: Command, tiny_engine: Path, tmp_path: Path) -> Report:
    """Return a function that writes the page for records."""

    def page_of(*records: Path) -> ReportPage:
        output = tmp_path / "report.html"
        result = command("report", tiny_engine, *records, "--output", output)
        assert result.code == 0, result.err
        return ReportPage(output.read_text(encoding="utf-8"))

    return page_of


def test_a_page_of_an_engine_shows_its_sizes_and_lists_missing_records(
    report: Report, command: Command, tiny_engine: Path
) -> None:
    page = report()
    assert page.links == list(page.sections)
    (facts,) = command("inspect", tiny_engine, "--json").records
    memory = facts["predicted_memory"]
    sizes = [memory["weights_bytes"], *memory["kv_bytes"].values(), memory["outputs_bytes"]]
    (drawn,) = [figure for figure in page.by("manifest.json") if figure.marks]
    assert [x for x, _ in drawn.marks] == sizes
    assert size_text(memory["total_bytes"]) in drawn.text
    cells = [cell for figure in page.by("manifest.json") for cell in figure.cells]
    assert facts["manifest_sha256"] in cells and "none" in cells
    for name, stored in facts["files"].items():
        assert {name, str(stored["bytes"]), stored["xxh3_128"]} <= set(cells)
    (passes,) = page.by("build_report.json")
    built = json.loads((tiny_engine / "build_report.json").read_text())["passes"]
    rows = [[p["role"], p["name"], str(p["applied"]), str(p["nodes"])] for p in built]
    applied = [cell for row in rows if row[2] != "0" for cell in row]
    assert passes.cells == applied
    for lacking in ("speed", "acceptance", "fidelity"):
        assert "No record. Create one with" in page.sections[lacking]
    # The engine is for the CPU, so sections of a GPU are omitted.
    assert next(iter(page.sections)) == "result"
    assert not {"roofline", "timeline"} & set(page.sections)
    assert "No speed was measured" in page.sections["result"]


def test_an_engine_without_a_draft_has_no_acceptance(
    command: Command, ids_engine: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.html"
    assert command("report", ids_engine, "--output", output).code == 0
    page = ReportPage(output.read_text(encoding="utf-8"))
    assert "acceptance" not in page.sections
    assert "in tokens/s" in page.sections["result"]


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (1.84, "The draft makes decoding 1.84 times as fast (median of 2 pairs); every output is"),
        (0.85, "The draft makes decoding slower: 0.85 times the speed (median of 2 pairs)"),
        (1.01, "The draft does not change the speed (median of 2 pairs)"),
    ],
)
def test_the_verdict_follows_from_the_ratio(
    report: Report, command: Command, tiny_engine: Path, tmp_path: Path, ratio: float, verdict: str
) -> None:
    prompts, file = tmp_path / "p.jsonl", tmp_path / "speed.json"
    prompts.write_text('{"prompt_ids": [3, 4]}\n{"prompt_ids": [5, 6]}\n')
    words = ("--prompts", prompts, "--max-new-tokens", 4, "--rounds", 1, "--json")
    (measured,) = command("bench", "pairs", tiny_engine, *words).records
    (entry,) = measured["sets"]
    entry |= {"without_draft_tokens_per_s": 100.0, "with_draft_tokens_per_s": 100 * ratio}
    entry |= {"ratio": ratio, "same_output": 2}
    file.write_text(json.dumps(measured | {"ratio": ratio}))
    page = report(file)
    result = page.sections["result"]
    assert verdict in result and "without draft, 2 prompts" in result
    drawn = page.by("speed.json")[0]
    assert [x for x, _ in drawn.marks] == [100.0, 100 * ratio]


def test_a_sweep_is_drawn_as_a_roofline_and_bars_with_floors(
    report: Report, tmp_path: Path
) -> None:
    sweep = json.loads(SWEEP.read_text())
    launches = [("NormLinear", "qkv", 3e-6), ("Attention", "attend", 5.5e-6)]
    sweep["timeline"] = [
        {"step": "no draft", "batch": 1, "layer": 11, "op": op, "kernel": kernel, "added_s": s}
        for op, kernel, s in launches
    ]
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(sweep))
    page = report(file)
    speeds, points, bars, timeline, _ = page.by("sweep.json")
    decoded = [p for p in sweep["phases"] if p["tokens_per_s"] and p["sweep"] != "prefill"]
    assert [x for x, _ in speeds.marks] == [p["tokens_per_s"] for p in decoded][:8]
    most = max(p["tokens_per_s"] for p in decoded)
    assert f"Up to {most:.0f} tokens/s" in page.sections["result"]
    expected = {
        (p["operations"] / p["bytes_total"], p["operations_per_s"] / 1e12) for p in sweep["phases"]
    }
    assert expected < set(points.marks)
    ceiling = sweep["ceiling_bytes_per_s"]
    roof = set(points.marks) - expected
    assert all(y == pytest.approx(ceiling * x / 1e12) for x, y in roof)
    num_bars = len(bars.marks)
    assert [x for x, _ in bars.marks] == [p["time_s"] for p in sweep["phases"]][:num_bars]
    assert bars.floors == [p["bytes_total"] / ceiling for p in sweep["phases"]][:num_bars]
    assert [x for x, _ in timeline.marks] == [s for *_, s in launches]
    assert "Layer 11" in timeline.text and "5.50 µs" in timeline.text
    assert hashlib.sha256(file.read_bytes()).hexdigest() in page.sections["provenance"]


def test_an_anatomy_shows_a_layer_of_each_kind(report: Report, tmp_path: Path) -> None:
    sweep = json.loads(SWEEP.read_text())
    times = [1e-6, 2e-6, 4e-6]
    launches = [
        {
            "section": "target", "layer": layer, "op": "Attention", "kernel": "a/kernel.cu:attend",
            "grid": [1, 1, 1], "block": 32, "shared_bytes": 0, "bytes_read": bytes_read,
            "starts_early": True, "needs": [], "added_s": added_s, "serial_s": added_s,
        }
        for layer, (added_s, bytes_read) in enumerate(zip(times, (10, 20, 10), strict=True))
    ]  # fmt: skip
    step = {
        "program": "step@1", "draft": "no draft", "batch": 1, "context": 9, "experts": 0,
        "experts_measured": True, "bytes_per_s": 4e12, "launches": launches, "step_s": 8e-6,
        "serial_s": 8e-6,
    }  # fmt: skip
    file = tmp_path / "anatomy.json"
    file.write_text(json.dumps({**sweep, "anatomies": [step]}))
    rows = [
        section for section in report(file).by("anatomy.json") if "mean time added" in section.text
    ]
    assert [[x for x, _ in row.marks] for row in rows] == [[pytest.approx(2.5e-6)], [2e-6]]
    assert "2 layers, 0, 2" in rows[0].text and "2.50 µs" in rows[0].text


def test_runs_and_comparisons_are_drawn_with_the_printed_figures(
    report: Report, command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    tree = ("--draft-top-k", 1, "--draft-depth", 3)
    bench = command(
        "bench", "pairs", tiny_engine, "--max-new-tokens", 12, "--rounds", 1, *tree, "--json"
    )
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "prompt": "ab"}\n{"id": "b", "prompt": "cd"}\n')
    run = command("run", tiny_engine, "--prompts", prompts, "--max-new-tokens", 9, *tree, "--json")
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(2).integers(3, 90, (1, 40)))
    compared = command(
        "compare", tiny_engine, tiny_engine, "--text", ids, "--max-new-tokens", 0, "--json"
    )
    files = []
    for name, result in (("bench", bench), ("run", run), ("compare", compared)):
        assert result.code == 0, result.err
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(result.out)
    page = report(*files)
    (entry,) = bench.records[0]["sets"]
    histogram = entry["acceptance_histogram"]
    shares = [sum(histogram[i:]) / sum(histogram) for i in range(1, len(histogram))]
    speed, drawn = [figure for figure in page.by("bench.json") if figure.marks]
    speeds = [entry[f"{way}_draft_tokens_per_s"] for way in ("without", "with")]
    assert [x for x, _ in speed.marks] == speeds
    assert drawn.marks == [(float(i), share) for i, share in enumerate(shares, start=1)]
    (table,) = [figure for figure in page.by("bench.json") if figure.cells]
    assert f"{entry['without_draft_tokens_per_s']:.1f}" in table.cells
    (drawn,) = [figure for figure in page.by("run.json") if figure.marks]
    together = np.sum([record["stats"]["acceptance_histogram"] for record in run.records], axis=0)
    assert drawn.marks[0] == (1.0, together[1:].sum() / together.sum())
    (drawn,) = [figure for figure in page.by("compare.json") if figure.marks]
    bins = compared.records[0]["by_position"]
    assert drawn.marks == [((b["first"] + b["last"]) / 2, b["divergence"]) for b in bins]
    fidelity = compared.records[0]["fidelity"]
    (table,) = [figure for figure in page.by("compare.json") if figure.cells]
    assert any(f"{fidelity['perplexity']:.4f}" in cell for cell in table.cells)


def test_a_table_of_costs_is_drawn_as_two_curves(report: Report, tmp_path: Path) -> None:
    costs = CostTable((1, 2, 4), (0.001, 0.0015, 0.0025), (0.0004, 0.0006, 0.0008))
    file = tmp_path / "cost-1.json"
    file.write_text(json.dumps(to_json(costs)))
    (drawn,) = report(file).by("cost-1.json")
    assert drawn.marks[:3] == [(1.0, 1.0), (2.0, 1.5), (4.0, 2.5)]
    expected = [1e3 * (costs.step_s(d + 1) + costs.chain_s(d)) for d in (1, 2, 3)]
    assert drawn.marks[3:] == list(zip((2.0, 3.0, 4.0), expected, strict=True))


def test_an_estimate_shows_its_predictions(
    report: Report, command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    steps = (ShapeCosts(1, 0, 0, 0, (0,), (0.005,), (0.0,)),)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(to_json(ServingCosts("NVIDIA H200", 64, (32,), (0.01,), steps))))
    words = ("--rate", 30, "--prompt-tokens", 20, "--output-tokens", 9, "--target-ttft-ms", 40)
    estimated = command("estimate", tiny_engine, "--costs", costs, *words, "--json")
    assert estimated.code == 0, estimated.err
    file = tmp_path / "plan.json"
    file.write_text(estimated.out)
    (section,) = report(file).by("plan.json")
    (estimate,) = estimated.records
    cells = [
        f"{1e3 * estimate['ttft_s'][name]:.1f}" for name in ("mean", "p50", "p90", "p99", "worst")
    ]
    place = section.cells.index("TTFT")
    assert section.cells[place + 1 : place + 6] == cells
    assert str(estimate["replicas"]["count"]) in section.cells and "on NVIDIA H200" in section.text


def test_a_verification_shows_its_stages_and_checks(report: Report, tmp_path: Path) -> None:
    stage = VerifyRow("layer 3", 17, 0.9999991, 2.5e-6, None, None, "cosine above 0.999", True)
    lossless = LosslessRow("chain of 3", 4, 64, 0, 1, True)
    file = tmp_path / "verify.json"
    file.write_text(json.dumps(to_json(VerifyReport((stage,), (lossless,), passed=True))))
    page = report(file)
    cells = [cell for figure in page.by("verify.json") for cell in figure.cells]
    assert {"layer 3", "17", "0.9999991", "2.5e-06", "chain of 3", "64"} <= set(cells)
    assert "all thresholds hold" in page.sections["fidelity"]


def test_html_in_names_is_escaped(report: Report, tmp_path: Path) -> None:
    sweep = json.loads(SWEEP.read_text())
    sweep["engine"] = sweep["gpu"] = HOSTILE
    sweep["phases"] = [{**phase, "name": HOSTILE} for phase in sweep["phases"]]
    sweep["left_out"] = [HOSTILE]
    file = tmp_path / "<b onload=x>&.json"
    file.write_text(json.dumps(sweep))
    page = report(file)  # An HTML parser that fails on a script, and on a tag that is not closed.
    assert page.by(file.name)
    speed = page.sections["speed"]
    assert '"><script>alert(1)</script>' in speed and "\\u202e\\x07" in speed
    assert not {"\u202e", "\x07"} & set("".join(page.sections.values()))


def test_rejects_invalid_records_in_one_line(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    output, file = tmp_path / "report.html", tmp_path / "record.json"
    sweep = json.loads(SWEEP.read_text())
    del sweep["phases"][0]["time_s"]
    for text, words in (
        ("{}", "no record that a report knows"),
        ('{"gpu": "x", "phases": []}', "no record that a report knows"),
        ("[1, 2]", "no record that a report knows"),
        ("not JSON", "cannot be read as JSON"),
        ('{"a": 1}\n{"b"', "cannot be read as JSON"),
        (json.dumps(sweep), "phases[0]: key 'time_s' is missing"),
    ):
        file.write_text(text)
        result = command("report", tiny_engine, file, "--output", output)
        assert result.code == 2 and words in result.err, result.err
        assert "\n" not in result.err.strip() and not output.exists()
    result = command("report", tiny_engine, tmp_path / "none.json", "--output", output)
    assert result.code == 2 and "cannot be read" in result.err
    result = command("report", tiny_engine, "--output", tmp_path / "none" / "report.html")
    assert result.code == 2 and "is no directory" in result.err
    result = command("report", tmp_path, "--output", output)
    assert result.code == 2 and not output.exists()


def test_equal_reports_are_equal_byte_for_byte(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        assert command("report", tiny_engine, SWEEP, "--output", tmp_path / name).code == 0
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_without_errors_and_horizontal_scrolling(
    report: Report, tmp_path: Path, dark: bool
) -> None:
    report(SWEEP)
    with browser(tmp_path / "profile") as page:
        page.look(600, 800, dark=dark)
        page.open((tmp_path / "report.html").as_uri())
        assert page.value("document.documentElement.scrollWidth") == 600
        assert not page.errors
        luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        assert (max(page.value(luminance)) < 64) is dark
