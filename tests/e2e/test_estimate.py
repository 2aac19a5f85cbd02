"""``specbuild estimate``: predictions for a CPU engine, from measured and from stored costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from specbuild.runtime.draft.device_costs import ShapeCosts
from specbuild.runtime.engine_dir.strict_json import to_json
from specbuild.runtime.measure.serving.costs import ServingCosts

SIZES = ("--prompt-tokens", 20, "--output-tokens", 11, "--requests", 200)


def stored_costs(file: Path, *, step_ms: float = 5.0) -> Path:
    """Store the costs of a machine with this step time; a prompt takes twice as long."""
    steps = [ShapeCosts(b, 0, 0, 0, (0,), (step_ms / 1e3,), (0.0,)) for b in (1, 2)]
    costs = ServingCosts("NVIDIA H200", 96, (32,), (2 * step_ms / 1e3,), tuple(steps))
    file.write_text(json.dumps(to_json(costs)))
    return file


def test_measured_costs_are_stored_and_reused(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    first = command("estimate", tiny_engine, "--rate", 5, *SIZES, "--save-costs", file, "--json")
    assert first.code == 0, first.err
    again = command("estimate", tiny_engine, "--rate", 5, *SIZES, "--costs", file, "--json")
    assert again.records == first.records
    (estimate,) = first.records
    assert (estimate["requests"], estimate["machine"], estimate["replicas"]) == (200, "cpu", None)
    prompt_s = json.loads(file.read_text())["prompt_s"]
    assert estimate["ttft_s"]["mean"] >= 0.9 * min(prompt_s)
    assert estimate["output_tokens_per_s"] == pytest.approx(11 * estimate["requests_per_s"])


def test_replicas_are_the_fewest_that_meet_the_targets(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    costs = stored_costs(tmp_path / "costs.json")

    def plan(*more: object) -> dict[str, Any]:
        result = command("estimate", tiny_engine, "--costs", costs, *SIZES, *more, "--json")
        assert result.code == 0, result.err
        estimate: dict[str, Any] = result.records[0]
        return estimate

    estimate = plan("--rate", 200, "--target-ttft-ms", 40)
    replicas = estimate["replicas"]
    assert replicas["count"] > 1 and replicas["ttft_p90_s"] <= 0.040
    assert estimate["busy_share"] > 0.98
    fewer = plan("--rate", replicas["requests_per_s"] * replicas["count"] / (replicas["count"] - 1))
    assert fewer["ttft_s"]["p90"] > 0.040
    alone = plan("--clients", 1)
    assert abs(alone["ttft_s"]["worst"] - 0.010) < 1e-9
    assert abs(alone["tpot_s"]["mean"] - 0.005) < 1e-9


def test_the_old_name_of_the_command_warns(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    costs = stored_costs(tmp_path / "costs.json")
    words = (tiny_engine, "--costs", costs, "--rate", 5, *SIZES, "--json")
    old, current = command("plan", *words), command("estimate", *words)
    assert old.code == 0 and old.records == current.records
    assert "warning: plan is deprecated; use estimate" in old.err


def test_prints_the_estimates(command: Command, tiny_engine: Path, tmp_path: Path) -> None:
    costs = stored_costs(tmp_path / "costs.json")
    result = command(
        "estimate", tiny_engine, "--costs", costs, "--gpu", "h200", "--rate", 300,
        "--target-tpot-ms", 8, *SIZES,
    )  # fmt: skip
    assert result.code == 0, result.err
    for part in (
        "on NVIDIA H200, 300 requests/s",
        "exceeds the capacity",
        "replicas",
        "TTFT",
    ):
        assert part in result.out


def test_reports_an_impossible_estimate_in_one_line(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    costs = stored_costs(tmp_path / "costs.json")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(json.loads(costs.read_text()) | {"prompt_s": [0.0]}))
    other = tmp_path / "other.json"
    other.write_text("[]")
    for words, said in (
        (("--costs", costs, "--gpu", "h100"), "measured on NVIDIA H200"),
        (("--costs", costs, "--rate", 1, "--prompt-tokens", 90, "--output-tokens", 9), "takes 96"),
        (("--costs", wrong, *SIZES), "malformed"),
        (("--costs", other, *SIZES), "other.json"),
        (("--costs", tmp_path / "none.json", *SIZES), "cannot be read"),
        (("--costs", costs, "--target-ttft-ms", 5, *SIZES), "targets are for a --rate"),
        (("--costs", costs, "--rate", 1, "--target-ttft-ms", 5, *SIZES), "no number of replicas"),
    ):
        result = command(
            "estimate", tiny_engine, "--prompt-tokens", 20, "--output-tokens", 4, *words
        )
        assert result.code == 2 and said in result.err, result.err
        assert "internal" not in result.err and "\n" not in result.err.strip()
