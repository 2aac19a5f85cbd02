"""``specbuild selftest``: correct engines pass, hardware faults are detected, exit codes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command

from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.selftest import run_checks

AGAIN = "the same prompts again"
TOGETHER = "2 prompts together, each as alone"
PROMPT = "prompt kernels against decoding steps"

Feeds = Mapping[str, np.ndarray]
Fault = Callable[[Feeds, np.ndarray], np.ndarray]


def test_a_correct_engine_passes(command: Command, tiny_engine: Path) -> None:
    result = command("selftest", tiny_engine, "--json")
    assert result.code == 0, result.err
    (report,) = result.records
    assert (report["sound"], report["backend"], report["reasons"]) == (True, "cpu", [])
    assert all(check["passed"] for check in report["checks"])
    names = [check["name"] for check in report["checks"]]
    assert names[1:4] == [AGAIN, TOGETHER, PROMPT]
    drafted = {name.partition(":")[0] for name in names[4:]}
    assert drafted == {"greedy", "sampled"}
    assert report["speed"]["tokens_per_s"] > 0
    assert report["speed"]["streaming_bytes_per_s"] > 1e8


def test_the_report_is_short(command: Command, ids_engine: Path) -> None:
    result = command("selftest", ids_engine)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert len(lines) <= 24
    assert "the engine has no draft" in result.out and "skipped" in result.out
    assert lines[-2].startswith("one sequence, no draft: ") and "a streaming read: " in lines[-2]
    assert lines[-1].startswith("sound: ")


def test_exit_codes_of_unsupported_and_damaged_engines(
    command: Command, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("selftest", tmp_path).refused("manifest.json")
    damaged = tmp_path / "engine"
    shutil.copytree(tiny_engine, damaged)
    weights = damaged / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert command("selftest", damaged).refused("weights.safetensors")
    monkeypatch.setattr(
        "specbuild.runtime.executors.registry.check_here",
        lambda *_: ["its kernels are for sm_90a, this GPU is sm_80"],
    )
    result = command("selftest", tiny_engine)
    assert result.code == 1
    assert "cannot run on this machine" in result.out and "sm_80" in result.out


def several(feeds: Feeds) -> bool:
    return len(feeds["row_start"]) > 2


def roll(feeds: Feeds, logits: np.ndarray) -> np.ndarray:
    return np.roll(logits, 1, axis=1)


def in_batches(feeds: Feeds, logits: np.ndarray) -> np.ndarray:
    """A decoding kernel with wrong results for two sequences of one row each."""
    rows = np.diff(feeds["row_start"])
    return roll(feeds, logits) if several(feeds) and (rows == 1).all() else logits


def in_long_launches(feeds: Feeds, logits: np.ndarray) -> np.ndarray:
    """A kernel with wrong results if many rows have logits, as in scoring."""
    return roll(feeds, logits) if not several(feeds) and len(logits) > 6 else logits


def in_trees(feeds: Feeds, logits: np.ndarray) -> np.ndarray:
    """A kernel with wrong results for the nodes of a draft tree."""
    verifies = len(logits) > len(feeds["row_start"]) - 1
    return roll(feeds, logits) if several(feeds) and verifies else logits


_RANDOM = np.random.default_rng(0)


def at_times(_feeds: Feeds, logits: np.ndarray) -> np.ndarray:
    """Memory that sometimes loses bits."""
    return logits + 4 * _RANDOM.standard_normal(logits.shape, np.float32)


@pytest.mark.parametrize(
    ("fault", "expected_kinds"),
    [
        (in_batches, {TOGETHER, PROMPT}),
        (in_long_launches, {PROMPT}),
        (in_trees, {"drafts"}),
        (at_times, {AGAIN, TOGETHER, "drafts"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_fails_the_check_of_the_affected_kernels(
    tiny_engine: Path, fault: Fault, expected_kinds: set[str]
) -> None:
    engine = Engine.load(tiny_engine)
    run = engine.executor.run  # type: ignore[union-attr]

    def faulty(role: str, feeds: Feeds) -> dict[str, np.ndarray]:
        outputs: dict[str, Any] = run(role, feeds)
        if role == "target":
            outputs = outputs | {"logits": fault(feeds, outputs["logits"])}
        return outputs

    engine.executor.run = faulty  # type: ignore[union-attr, method-assign]
    checks = list(run_checks(engine, budget_s=2.0))
    failed = {c.name for c in checks if c.passed is False}
    kinds = {"drafts" if "against no draft" in name else name for name in failed}
    assert expected_kinds <= kinds, failed
    if fault is not at_times:
        # If plain decoding is faulty, runs with drafts differ from it too.
        assert kinds <= expected_kinds | {"drafts"}, failed
