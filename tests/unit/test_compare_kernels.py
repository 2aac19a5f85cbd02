"""Comparing kernels: what two listings differ in, and from where a version is taken."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
REQUESTS = [{"op": "Linear"}, {"op": "RmsMoe"}]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("compare_kernels")
        sys.modules.pop("compare_kernels", None)


class Codes:
    """Machine code whose parts a listing itself spells: ``cubin`` is JSON of them."""

    def code(self, launch: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(parts=json.loads(launch["cubin"]), digest=launch["cubin"])


def launch(kernel: str = "linear/kernel.cu:go", *, grid: int = 1, **parts: str) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "entry": kernel.rpartition(":")[2],
        "source": json.dumps([kernel, parts]),
        "launch": {"grid": [grid, 1, 1]},
        "cubin": json.dumps(parts),
    }


def listing(*launches: dict[str, Any]) -> list[dict[str, Any]]:
    """Both requests launch the same."""
    return [{"launches": list(launches)} for _ in REQUESTS]


def test_a_listing_equals_itself(script: ModuleType) -> None:
    same = listing(launch(text="a"), launch(text="b"))
    result = script.compare(REQUESTS, same, same, Codes())
    assert result.equal
    assert {op: dict(states) for op, states in result.states.items()} == {
        "Linear": {"identical": 2},
        "RmsMoe": {"identical": 2},
    }
    assert [line.split() for line in script.table(result)][-1] == [
        "all",
        "0",
        "4",
        "0",
        "0",
        "0",
        "0",
        "2",
    ]


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
        ([launch()], [launch(grid=2)], "identical", "launched with another grid"),
        (
            [launch()],
            [launch() | {"problem": "it spills"}],
            "problem",
            "linear/kernel.cu:go: None → it spills",
        ),
    ],
)
def test_a_difference_is_found_and_named(
    script: ModuleType, old: list[Any], new: list[Any], state: str, line: str
) -> None:
    result = script.compare(REQUESTS, listing(*old), listing(*new), Codes())
    assert not result.equal
    assert result.states["Linear"][state] == 1
    assert [found for found in result.lines if found.endswith(line)] != []


def test_what_both_give_the_compiler_is_the_same(script: ModuleType) -> None:
    uncompiled = {k: v for k, v in launch().items() if k != "cubin"}
    same, other = ({**uncompiled, "source": key} for key in ("a", "b"))
    result = script.compare(REQUESTS, listing(same), listing(same), Codes())
    assert result.equal and result.states["Linear"] == {"same source": 1}
    changed = listing(other | {"cubin": "{}"})
    result = script.compare(REQUESTS, listing(same | {"cubin": "{}"}), changed, Codes())
    assert result.equal and result.states["Linear"] == {"identical": 1}


def test_a_version_that_refuses_is_named(script: ModuleType) -> None:
    refused = [{"refused": "too wide"}] * 2
    result = script.compare(REQUESTS, refused, listing(launch()), Codes())
    assert "Linear: the old version refuses: too wide" in result.lines
    assert result.states["Linear"]["new"] == 1
    assert script.compare(REQUESTS, refused, refused, Codes()).equal


def test_a_version_is_a_checkout_or_a_revision(script: ModuleType, tmp_path: Path) -> None:
    assert script.checkout(str(ROOT), tmp_path) == ROOT
    with pytest.raises(ValueError, match="neither a checkout nor a revision"):
        script.checkout("no-such-revision", tmp_path)
    found = script.packages(ROOT, tmp_path / "packages") / "specbuild"
    assert (found / "plugins_cuda" / "registry.py").is_file()
    assert (found / "__init__.py").is_file()
