"""Comparing kernels: differences between two listings, and the sources of a version."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from script_modules import BENCHMARKS, script_modules

ROOT = Path(__file__).parents[2]
REQUESTS = [{"op": "Linear"}, {"op": "RmsMoe"}]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with script_modules(BENCHMARKS, "compare_kernels", "kernel_versions") as modules:
        yield modules["compare_kernels"]


class Cubins:
    """Machine code whose parts are encoded in the name of a cubin, as JSON."""

    def code(self, cubin: str, entry: str) -> SimpleNamespace:
        return SimpleNamespace(parts=json.loads(cubin), digest=f"{entry}{cubin.strip()}")


def launch(kernel: str = "linear/kernel.cu:go", *, grid: int = 1, **parts: str) -> dict[str, Any]:
    """Return a launch whose source determines the compiled machine code."""
    return {
        "kernel": kernel,
        "entry": kernel.rpartition(":")[2],
        "source": json.dumps(parts),
        "launch": {"grid": [grid, 1, 1]},
    }


def listing(*launches: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a listing in which both requests have equal launches."""
    return [{"launches": list(launches)} for _ in REQUESTS]


def compared(script: ModuleType, old: list[Any], new: list[Any]) -> Any:
    """Compile and compare every pair that needs it."""

    def code(source: str) -> dict[str, str]:
        return json.loads(source) if "problem" in source else {"cubin": source}

    verdicts = {
        pair: script.judged(pair, code(pair.old), code(pair.new), Cubins())
        for pair in script.pairs(old, new, same=False)
    }
    return script.compare(REQUESTS, old, new, verdicts)


def test_a_listing_equals_itself(script: ModuleType) -> None:
    same = listing(launch(text="a"), launch(text="b"))
    assert script.pairs(same, same, same=False) == []
    result = script.compare(REQUESTS, same, same, {})
    assert result.equal
    assert {op: dict(states) for op, states in result.states.items()} == {
        "Linear": {"same source": 2},
        "RmsMoe": {"same source": 2},
    }
    total = [line.split() for line in script.table(result)][-1]
    assert total == ["all", "4", "0", "0", "0", "0", "0", "0", "2"]


@pytest.mark.parametrize(
    ("old", "new", "state", "line"),
    [
        ([launch(text="a")], [launch(text="b")], "changed", "linear/kernel.cu:go: changed in text"),
        (
            [launch(text="a", notes="1")],
            [launch(notes="2", text="a")],
            "changed",
            "changed in notes",
        ),
        ([launch(text="a")], [launch(text="a", bank="1")], "changed", "changed in bank"),
        ([launch()], [launch(), launch("x/y.cu:z")], "new", "new: x/y.cu:z"),
        ([launch(), launch("x/y.cu:z")], [launch()], "gone", "gone: x/y.cu:z"),
        ([launch()], [launch(grid=2)], "same source", "launched with another grid"),
        (
            [launch()],
            [launch(problem="no such name")],
            "problem",
            "linear/kernel.cu:go: None → no such name",
        ),
    ],
)
def test_reports_a_difference_with_its_kind(
    script: ModuleType, old: list[Any], new: list[Any], state: str, line: str
) -> None:
    result = compared(script, listing(*old), listing(*new))
    assert not result.equal
    assert result.states["Linear"][state] == 1
    assert [actual for actual in result.lines if actual.endswith(line)] != []


def test_other_sources_may_have_equal_machine_code(script: ModuleType) -> None:
    old, new = listing(launch(text="a")), listing(launch(text="a"))
    for described in new:
        described["launches"][0]["source"] += " "
    [pair] = script.pairs(old, new, same=False)
    result = compared(script, old, new)
    assert result.equal and result.states["Linear"] == {"identical": 1}
    left = script.compare(REQUESTS, old, new, {})
    assert not left.equal and left.states["Linear"] == {"left": 1}
    assert script.pairs(old, old, same=True) == [script.Pair(pair.old, pair.old, "go", "go")]


def test_every_file_is_compared(script: ModuleType) -> None:
    names = ["a", "a", "b", "c", "b", "a"]
    old = listing(*(launch(name, text=f"{name}{i}") for i, name in enumerate(names)))
    new = listing(*(launch(name, text=f"{name}{i}'") for i, name in enumerate(names)))
    order = [pair.old_entry for pair in script.pairs(old, new, same=False)]
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_stopped_run_is_resumed(script: ModuleType, tmp_path: Path) -> None:
    pair, verdict = script.Pair("1", "2", "go", "go"), script.Verdict("identical", "code")
    record = tmp_path / "record.jsonl"
    assert script.recorded(record) == script.recorded(None) == {}
    line = json.dumps([pair, vars(verdict)])
    record.write_text(f'{line}\n["half')
    assert script.recorded(record) == {pair: verdict}
    assert record.read_text() == f"{line}\n"


def test_reports_a_version_that_rejects_a_request(script: ModuleType) -> None:
    refused = [{"refused": "too wide"}] * 2
    result = script.compare(REQUESTS, refused, listing(launch()), {})
    assert "Linear: the old version refuses: too wide" in result.lines
    assert result.states["Linear"]["new"] == 1
    assert script.compare(REQUESTS, refused, refused, {}).equal


def test_a_version_is_a_checkout_or_a_revision(script: ModuleType, tmp_path: Path) -> None:
    versions = sys.modules["kernel_versions"]
    assert versions.checkout(str(ROOT), tmp_path) == ROOT
    with pytest.raises(ValueError, match="neither a checkout nor a revision"):
        versions.checkout("no-such-revision", tmp_path)
    result = versions.packages(ROOT, tmp_path / "packages") / "specbuild"
    assert (result / "plugins_cuda" / "registry.py").is_file()
    assert (result / "__init__.py").is_file()
