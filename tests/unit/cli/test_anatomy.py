"""Launches grouped by equal layers, as a table of 80 columns, a chart and JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from test_cuda_engine_directory import write_cuda_engine

from specbuild.cli.anatomy.groups import folded
from specbuild.cli.anatomy.options import AnatomyOptions
from specbuild.cli.anatomy.planned import planned_anatomies
from specbuild.cli.anatomy.tables import anatomy_tables
from specbuild.cli.anatomy.timeline import plot_anatomies
from specbuild.cli.main import main
from specbuild.cli.terminal.console import json_line, plain_console
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.measure.anatomy import LaunchAnatomy, StepAnatomy

LAYERS, COLUMNS = 8, 80
READ = 4e12


def launch_of(op: str, bytes_read: float, **changes: object) -> LaunchAnatomy:
    name = op.lower()
    launch = LaunchAnatomy(
        "target", None, op, f"{name}/kernel.cu:{name}_rows", (8, 2, 1), 128, 0, bytes_read,
        starts_early=True, needs=(),
    )  # fmt: skip
    return replace(launch, **changes)


def small_step(*, measured: bool = True) -> StepAnatomy:
    """Return a draft level, alternating layers (even ones read half as much), and a head."""
    launches = [launch_of("Draft", 3e6, section="level 1")]
    for layer in range(LAYERS):
        reads = 4e6 if layer % 2 else 2e6
        launches += [
            launch_of("Project", 5e6, layer=layer),
            launch_of("Attend", reads, layer=layer, starts_early=False),
        ]
    launches.append(launch_of("Head", 9e6))
    chance = random.Random(3)
    placed = []
    for place, launch in enumerate(launches):
        needs = (place - 2, place - 1) if launch.op != "Head" and place > 1 else ()
        needs = (place - 2,) if launch.op == "Head" else needs
        added_s = 1e-6 * chance.uniform(1, 5)
        times = {"added_s": added_s, "serial_s": 1.5 * added_s} if measured else {}
        placed.append(replace(launch, needs=needs, **times))
    step_s = sum(launch.added_s or 0.0 for launch in placed) * 1.02
    return StepAnatomy(
        "step@1.draft-1-1-1", "chain of 1", 1, 1000.0, 4.0, experts_measured=measured,
        bytes_per_s=READ, launches=tuple(placed),
        step_s=step_s if measured else None, serial_s=1.5 * step_s if measured else None,
    )  # fmt: skip


def test_equal_layers_form_one_group() -> None:
    step = small_step()
    groups = folded(step)
    assert [(group.title, group.copies) for group in groups] == [
        ("level 1", 1),
        ("target: 4 layers, 0, 2, 4, 6", 4),
        ("target: 4 layers, 1, 3, 5, 7", 4),
        ("target, outside of layers", 1),
    ]
    assert sum(group.copies * len(group.rows) for group in groups) == len(step.launches)
    assert sum(group.bytes_read for group in groups) == step.bytes_read
    even = groups[1]
    mine = [x for x in step.launches if x.layer is not None and x.layer % 2 == 0]
    attending = [x.added_s for x in mine if x.op == "Attend"]
    assert even.rows[1].added_s == pytest.approx(sum(map(float, attending)) / 4)  # type: ignore[arg-type]
    assert even.added_s == pytest.approx(sum(x.added_s or 0.0 for x in mine))
    assert [row.waits_for for row in even.rows] == ["front", "front"]
    assert [row.waits_for for group in groups for row in group.rows][-1] == "2 before"
    assert groups[0].rows[0].waits_for == "–"
    unlike = replace(step, launches=tuple(replace(x, block=64) if x.layer == 2 else x
                                          for x in step.launches))  # fmt: skip
    assert [group.copies for group in folded(unlike)] == [1, 3, 4, 1, 1]


def drawn(step: StepAnatomy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with (folder / "table.txt").open("w") as file:
        plain_console(file).print(anatomy_tables(step))
    return (folder / "table.txt").read_text().splitlines()


def test_the_table_is_80_columns_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step()
    lines = drawn(step, tmp_path, monkeypatch)
    assert max(map(len, lines)) <= COLUMNS
    rows = [line.split() for line in lines]
    head = next(row for row in rows if row[:1] == ["head_rows"])
    added_s = step.launches[-1].added_s or 0.0
    share = round(100 * 9e6 / READ / added_s)
    assert head == [
        "head_rows", "16", f"{1e6 * added_s:.2f}", f"{1.5e6 * added_s:.2f}", "9.00",
        f"{share}", "%", "early", "2", "before",
    ]  # fmt: skip
    together = next(row for row in rows if row[:3] == ["all", "4", "together"])
    assert together[5] == "28.00"
    assert any("after" in row for row in rows)
    text = "\n".join(lines)
    total = sum(launch.added_s or 0.0 for launch in step.launches)
    assert f"as one graph: {1.02e6 * total:.1f} µs" in text
    assert f"its launches add up to {1e6 * total:.1f} µs: 98.0 %" in text
    assert f"none beside another (serial): {1.53e6 * total:.1f} µs" in text


def test_without_times_the_table_has_floors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = drawn(small_step(measured=False), tmp_path, monkeypatch)
    assert max(map(len, lines)) <= COLUMNS
    row = next(line.split() for line in lines if line.startswith("head_rows"))
    assert row == ["head_rows", "16", "128", "9.00", "2.25", "early", "2", "before"]
    assert "~4.0 experts a layer" in "\n".join(lines)
    assert "as its graph" not in "\n".join(lines)


def test_the_chart_has_every_launch(tmp_path: Path) -> None:
    steps = [small_step(), replace(small_step(), draft="no draft")]
    plot_anatomies(steps, tmp_path / "steps.svg", engine="toy on Fake")
    ids = {element.get("id") for element in ElementTree.parse(tmp_path / "steps.svg").iter()}
    for number, step in enumerate(steps):
        assert {f"step-{number}-launch-{i}" for i in range(len(step.launches))} <= ids
        layers = [group for group in folded(step) if group.is_layers]
        assert len(layers) == 2
        for place, group in enumerate(layers):
            rows = [f"step-{number}-group-{place}-row-{i}" for i in range(len(group.rows))]
            assert {*rows, *(f"{row}-serial" for row in rows)} <= ids


@pytest.mark.parametrize("measured", [True, False])
def test_json_can_be_read(measured: bool) -> None:
    step = small_step(measured=measured)
    line = json.loads(json_line(step))
    assert from_json(StepAnatomy, line, "it") == step
    assert line["launches"][1]["layer"] == 0
    assert line["launches"][1]["added_s"] == step.launches[1].added_s


@pytest.fixture
def toy_engine(tmp_path: Path) -> Path:
    """A CUDA engine whose programs have one launch each."""
    write_cuda_engine(tmp_path / "toy")
    return tmp_path / "toy"


def test_inspect_reads_the_plan(toy_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(toy_engine), "--anatomy", "--batch", "2", "--context", "20"]
    assert main([*arguments, "--json", "--read-speed", "2"]) == 0
    read = json.loads(capsys.readouterr().out)["anatomies"]
    steps = [from_json(StepAnatomy, step, "it") for step in read]
    assert [(step.draft, step.batch, step.context) for step in steps] == [
        ("no draft", 2, 20), ("chain of 1", 2, 20),
    ]  # fmt: skip
    for step in steps:
        assert (step.bytes_per_s, step.step_s, len(step.launches)) == (2e12, None, 1)
        assert step.launches[0].kernel.startswith(f"toy/kernel.cu:{step.program}")
    assert main(arguments) == 0
    assert "chain of 1), batch 2, context 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--anatomy", "--batch", "5"), "the engine takes 3 sequences of 64 tokens, asked for 5"),
        (("--anatomy", "--context", "65"), "asked for 1 of 65"),
        (("--context", "9"), "--batch, --context and --read-speed are for --anatomy: add it"),
    ],
)
def test_inspect_rejects_steps_that_the_engine_does_not_have(
    toy_engine: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str], sentence: str
) -> None:
    assert main(["inspect", str(toy_engine), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_an_engine_without_a_plan_has_no_anatomy(
    make_manifest: Callable[[], Manifest], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedHereError, match="was built for cpu; leave it out"):
        planned_anatomies(tmp_path, make_manifest(), AnatomyOptions(anatomy=True))
