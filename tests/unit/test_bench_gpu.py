"""The regression gate of a GPU: records, changes between two of them, rounds of processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_modules import BENCHMARKS, script_modules

READ = "streaming read"
SETTINGS = {"20B": "some options"}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with script_modules(
        BENCHMARKS, "gpu_record", "gpu_rows", "gpu_engines", "bench_gpu"
    ) as modules:
        yield modules


@pytest.fixture(scope="module")
def records(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["gpu_record"]


@pytest.fixture(scope="module")
def gate(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["bench_gpu"]


def row(records: ModuleType, name: str, unit: str, *values: float, **named: Any) -> Any:
    return records.Row(name, unit, list(values), **named)


def stored(*rows: Any, settings: dict[str, str] = SETTINGS) -> dict[str, Any]:
    result = {"date": "2026-11-28", "settings": settings, "rows": [r.to_json() for r in rows]}
    return dict(json.loads(json.dumps(result)))


def verdicts(records: ModuleType, rows: list[Any], record: Any, **named: Any) -> dict[str, str]:
    changes = records.compared(rows, SETTINGS, record, **named)
    return {change.row.name: change.verdict for change in changes}


def test_a_row_is_the_median_of_its_rounds(records: ModuleType) -> None:
    measured = records.Row("20B step")
    for value, share in ((12.0, 0.5), (10.0, 0.7), (11.0, 0.6)):
        measured.add({"value": value, "unit": "us", "share": share, "detail": {"experts": value}})
    assert (measured.median, measured.share, measured.spread) == (11, 0.6, pytest.approx(2 / 11))
    assert measured.detail == {"experts": 11} and not measured.follows_read
    assert records.Row.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert row(records, "a", "us", 5, 1, 2, 9).middle() == (2, 5)
    assert row(records, "a", "us", 5, 1, 9).middle() == (1, 9)


def test_each_gpu_has_its_own_records(records: ModuleType) -> None:
    assert records.card_file("NVIDIA H200") == "h200.json"
    assert records.card_file("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3.json"


@pytest.mark.parametrize(
    ("unit", "values", "verdict"),
    [
        ("us", (101.9, 102.0, 101.8), "same"),
        ("us", (102.5, 102.6, 102.4), "slower"),
        ("us", (97.5, 97.6, 97.4), "faster"),
        ("tokens/s", (97.5, 97.6, 97.4), "slower"),
        ("tokens/s", (102.5, 102.6, 102.4), "faster"),
        # The median changed, but one round of each record overlaps.
        ("us", (100.0, 103.0, 104.0), "unsure"),
        # Of five rounds, the extremes are not considered for overlaps.
        ("us", (100.0, 103.0, 103.1, 103.2, 130.0), "slower"),
    ],
)
def test_lists_changes_beyond_the_tolerance(
    records: ModuleType, unit: str, values: tuple[float, ...], verdict: str
) -> None:
    before = stored(row(records, "20B step", unit, 99.9, 100.0, 100.1))
    assert verdicts(records, [row(records, "20B step", unit, *values)], before) == {
        "20B step": verdict
    }


def test_a_slower_read_explains_rows_that_follow_it(records: ModuleType) -> None:
    """The limit is the read's own change; prompts do not depend on it, and larger changes count."""
    before = stored(
        row(records, READ, "TB/s", 4.66),
        row(records, "20B step", "us", 100.0, follows_read=True),
        row(records, "20B decoding", "tokens/s", 100.0, follows_read=True),
        row(records, "20B prompt", "ms", 100.0),
    )

    def now(read: float, change: float) -> dict[str, str]:
        rows = [
            row(records, READ, "TB/s", read),
            row(records, "20B step", "us", 100 * change, follows_read=True),
            row(records, "20B decoding", "tokens/s", 100 / change, follows_read=True),
            row(records, "20B prompt", "ms", 100 * change),
        ]
        return verdicts(records, rows, before)

    assert list(now(4.54, 1.04).values()) == ["same", "same", "same", "slower"]
    assert list(now(4.54, 1.0).values()) == ["same"] * 4
    assert list(now(4.54, 1.05).values()) == ["same", "slower", "slower", "slower"]
    assert list(now(4.54, 0.97).values()) == ["same", "faster", "faster", "faster"]
    assert now(4.0, 1.0)[READ] == "slower"


@given(
    st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5),
    st.sampled_from(("us", "tokens/s")),
    st.booleans(),
    st.floats(1.05, 3),
)
def test_a_record_equals_itself_and_differs_from_a_multiple(
    records: ModuleType, values: list[float], unit: str, follows: bool, factor: float
) -> None:
    result = row(records, "20B step", unit, *values, follows_read=follows)
    assert verdicts(records, [result], stored(result)) == {"20B step": "same"}
    more = row(records, "20B step", unit, *(v * factor for v in values), follows_read=follows)
    [verdict] = verdicts(records, [more], stored(result)).values()
    moved = "faster" if unit == "tokens/s" else "slower"
    assert verdict in (moved, "unsure")
    assert verdict == moved or max(values) / min(values) >= factor


def test_lists_rows_that_cannot_be_compared(records: ModuleType) -> None:
    before = stored(
        row(records, "20B gone", "us", 1.0),
        row(records, "20B broken", "us", 1.0),
        row(records, "20B unit", "ms", 1.0),
        row(records, "120B other", "us", 1.0),
        settings={**SETTINGS, "120B": "others"},
    )
    rows = [
        row(records, "20B broken", "us", error="SpecbuildError: no memory"),
        row(records, "20B unit", "us", 1.0),
        row(records, "120B other", "us", 1.0),
        row(records, "20B fresh", "us", 1.0),
    ]
    changes = records.compared(rows, SETTINGS, before)
    assert [change.verdict for change in changes] == [
        "failed", "other settings", "other settings", "new", "missing",
    ]  # fmt: skip
    assert records.fails(changes) and not records.fails(changes[1:4])
    lines = "\n".join([*records.table(changes, "2026-11-28"), *records.summary(changes)])
    for text in (
        "20B broken failed: SpecbuildError: no memory",
        "20B gone   missing: only the record has it",
        "not in the record: 20B fresh",
        "record of 2026-11-28",
    ):
        assert text in lines


def test_the_table_has_measured_and_recorded_values(records: ModuleType) -> None:
    before = stored(row(records, "20B step", "us", 1200.0))
    now = row(records, "20B step", "us", 1250.0, 1240.0, 1260.0, shares=[0.66, 0.67, 0.68])
    changes = records.compared([now], SETTINGS, before)
    [_, line] = records.table(changes, "2026-11-28")
    assert line.split() == [
        "20B", "step", "1250.0", "us", "1.6%", "67.0%", "1200.0", "us", "+4.2%", "slower",
    ]  # fmt: skip
    [text] = records.summary(changes)
    assert text == "slower by more than 2%: 20B step"
    [_, alone] = records.table(records.compared([now], SETTINGS, None), None)
    assert alone.split()[-1] == "new" and not records.fails(records.compared([now], {}, None))


# A process like gpu_rows.py: rows named "dies" and "hangs" do so, one named "fails" reports it.
WORKER = """
import json, os, sys, time
rows = [word.removeprefix("--row=") for word in sys.argv if word.startswith("--row=")]
log = open(sys.argv[1] + ".calls", "a")
print(json.dumps(rows), file=log, flush=True)
if "unreadable" in sys.argv[1]:
    sys.exit("error: no engine")
def say(**message): print(json.dumps(message), flush=True)
say(gpu="NVIDIA Fake", cuda="13.0", weights_bytes=2 * 10**12)
print("a line of a library")
say(row="streaming read", value=4.0, unit="TB/s")
for row in rows:
    say(begins=row)
    if "dies" in row:
        print("CUDA_ERROR_ILLEGAL_ADDRESS", file=sys.stderr, flush=True)
        os._exit(3)
    if "hangs" in row:
        time.sleep(60)
    if "fails" in row:
        say(row=row, error="SpecbuildError: no such program")
        sys.exit(1)
    say(row=row, value=100.0, unit="us", share=0.5, follows_read=True)
"""


@pytest.fixture
def session_of(
    gate: ModuleType, records: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    manifest = type("M", (), {"target": type("T", (), {"vocab": 7})})
    monkeypatch.setattr(gate, "read_manifest", lambda _: manifest)

    def make(*names: str, engines: tuple[str, ...] = ("20B",), **named: Any) -> Any:
        rows = {name: records.Row(name) for name in (READ, *names)}
        places = {label: tmp_path / label for label in engines}
        return gate.Session(places, rows, worker=worker, **named)

    return make


def test_a_failed_row_does_not_affect_others(session_of: Any, tmp_path: Path) -> None:
    """Each failure ends a process; another one measures the rest, and later rounds omit the row."""
    names = ("20B a", "20B fails", "20B b", "20B dies", "20B c", "20B hangs", "20B d")
    session = session_of(*names, row_limit_s=5.0)
    session.measure(2, 300, lambda: None)
    assert [len(session.rows[name].values) for name in names] == [2, 0, 2, 0, 2, 0, 2]
    assert session.rows["20B fails"].error == "SpecbuildError: no such program"
    assert session.rows["20B dies"].error == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "silent for 5.0 s" in session.rows["20B hangs"].error
    calls = [json.loads(line) for line in (tmp_path / "20B.calls").read_text().splitlines()]
    assert [call[0] for call in calls] == ["20B a", "20B b", "20B c", "20B d", "20B a"]
    assert calls[-1] == ["20B a", "20B b", "20B c", "20B d"]
    assert session.facts["gpu"] == "NVIDIA Fake" and session.rows[READ].values == [4.0] * 5


def test_an_engine_that_does_not_load_fails_its_rows(session_of: Any) -> None:
    session = session_of("unreadable a", "unreadable b", "20B a", engines=("unreadable", "20B"))
    session.measure(2, 300, lambda: None)
    for name in ("unreadable a", "unreadable b"):
        assert session.rows[name].error == "no row was measured: error: no engine"
    assert len(session.rows["20B a"].values) == 2


def test_the_start_of_a_process_is_a_row(session_of: Any) -> None:
    name = "20B first token of a fresh process"
    session = session_of("20B a", name, fresh_process=lambda _, vocab: vocab / 2)
    session.measure(1, 300, lambda: None)
    assert session.rows[name].values == [3.5]
    # 2 TB of weights in 3.5 s, of 4 TB/s
    assert session.rows[name].share == pytest.approx(1 / 7)

    def broken(directory: Path, vocab: int) -> float:
        raise OSError("no such file")

    session = session_of("20B a", name, fresh_process=broken)
    session.measure(2, 300, lambda: None)
    assert session.rows[name].error == "OSError: no such file"
    assert len(session.rows["20B a"].values) == 2


def test_the_budget_drops_rounds_but_no_row(session_of: Any) -> None:
    session = session_of("20B a", "20B b")
    saved: list[int] = []
    session.measure(4, 0.0, lambda: saved.append(len(session.rows["20B b"].values)))
    assert [len(row.values) for row in session.rows.values()] == [1, 1, 1]
    assert saved == [1] and session.notes[0].startswith("3 of 4 rounds were dropped")


def test_a_check_fails_if_a_row_changed(
    gate: ModuleType, session_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first run stores a record, the second equals it, and a third is compared with another."""
    monkeypatch.setattr(gate, "RECORDS", tmp_path / "records")
    output = tmp_path / "now.json"
    session = session_of("20B a")
    session.measure(2, 300, lambda: None)
    output.write_text(json.dumps(gate.record_of(session, SETTINGS, 1.0)))

    def conclude(*words: str) -> int:
        options = gate._parser().parse_args([*words, "--output", str(output)])
        return int(gate.conclude(session, SETTINGS, output, options))

    card = tmp_path / "records" / "fake.json"
    assert conclude("--check") == 0 and not card.exists()
    assert "does not exist: run with --record" in capsys.readouterr().out
    assert conclude("--record") == 0
    assert card.read_bytes() == output.read_bytes()
    result = json.loads(card.read_text())
    assert result["gpu"] == "NVIDIA Fake" and result["settings"] == SETTINGS and result["date"]
    assert conclude("--check") == 0
    before = json.loads(card.read_text())
    before["rows"][1]["values"] = [90.0]
    other = tmp_path / "before.json"
    other.write_text(json.dumps(before))
    assert conclude("--against", str(other)) == 0
    assert conclude("--against", str(other), "--check") == 1
    assert "slower by more than 2%: 20B a" in capsys.readouterr().out
    assert conclude("--against", str(other), "--check", "--tolerance", "0.2") == 0
    session.rows["20B a"].error = "it broke"
    assert conclude("--record") == 0 and conclude("--check") == 1
    assert "not stored: a record needs every row" in capsys.readouterr().out


def test_engines_are_rebuilt_if_sources_changed(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = scripts["gpu_engines"]
    script = tmp_path / "synth.py"
    script.write_text(
        "import pathlib, sys\n"
        "engine = pathlib.Path(sys.argv[sys.argv.index('--engine') + 1])\n"
        "if 'bad' in sys.argv: sys.exit('error: a wrong option')\n"
        "engine.mkdir(exist_ok=True); (engine / 'manifest.json').write_text('{}')\n"
        "with open(str(engine) + '.builds', 'a') as file: file.write('x')\n"
    )
    command = [sys.executable, str(script)]
    monkeypatch.setattr(engines, "ENGINES", {"20B": "--draft", "120B": "bad"})
    places = {"20B": tmp_path / "20B", "120B": tmp_path / "120B"}

    def builds() -> str:
        return (tmp_path / "20B.builds").read_text()

    failed = engines.build_engines(places, command)
    assert failed == {"120B": "`specbuild synth` ended with 1: error: a wrong option"}
    good = {"20B": places["20B"]}
    assert engines.build_engines(good, command) == {} and builds() == "x"
    monkeypatch.setattr(engines, "ENGINES", {"20B": "--draft --other"})
    engines.build_engines(good, command)
    assert builds() == "xx"
    root = tmp_path / "sources"
    (root / "builder").mkdir(parents=True)
    (root / "builder" / "kernel.cu").write_text("one")
    monkeypatch.setattr(engines, "ROOT", root)
    engines.build_engines(good, command)
    (root / "builder" / "kernel.cu").write_text("two")
    engines.build_engines(good, command)
    assert builds() == "xxxx"


def test_every_row_is_planned(gate: ModuleType) -> None:
    assert list(gate.SIZES) == list(gate.ENGINES)
    rows = gate.planned_rows(list(gate.ENGINES), [])
    for name in (
        READ,
        "20B step, batch 64, chain of 3",
        "20B decoding, batch 16, no draft",
        "20B prompt of 8192 tokens",
        "20B cost of top_p 0.9, batch 16, chain of 3",
        "20B first token of a fresh process",
        "120B step, batch 64, no draft",
        "120B first token of a fresh process",
        "120B-long prompt of 512 tokens",
    ):
        assert name in rows
    assert not [name for name in rows if name.startswith("120B") and "chain" in name]
    assert not [name for name in rows if name.startswith("120B prompt")]
    assert sum(name.startswith("120B-long") for name in rows) == 2
    assert list(gate.planned_rows(["20B"], ["prompt", "cost of min_p"])) == [
        READ,
        "20B prompt of 512 tokens",
        "20B prompt of 8192 tokens",
        "20B cost of min_p 0.05, batch 1, chain of 3",
        "20B cost of min_p 0.05, batch 16, chain of 3",
    ]


def test_a_run_builds_measures_stores_and_compares(
    gate: ModuleType, session_of: Any, scripts: dict[str, ModuleType], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One engine cannot be built: its rows fail, the others are measured and stored."""
    worker = tmp_path / "worker.py"
    start = {"worker": worker, "fresh_process": lambda *_: 1.5}
    monkeypatch.setattr(gate, "Session", partial(gate.Session, **start))
    monkeypatch.setattr(gate, "build_engines", lambda _: {"120B-long": "no space left"})
    monkeypatch.setattr(gate, "write_read_kernel", lambda _: (None, "no compiler"))
    monkeypatch.setattr(gate, "RECORDS", tmp_path / "records")
    output = tmp_path / "out" / "now.json"
    words = ["--engines", str(tmp_path / "engines"), "--output", str(output), "--rounds", "2"]
    assert gate.main(words) == 0 and gate.main([*words, "--check"]) == 1
    printed = capsys.readouterr().out
    assert "120B-long prompt of 512 tokens" in printed and "failed: no space left" in printed
    assert "no compiler" in printed
    result = json.loads(output.read_text())
    assert result["rounds"] == 2 and result["notes"] == ["no compiler"]
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["20B first token of a fresh process"]["values"] == [1.5, 1.5]
    assert rows["20B step, batch 16, no draft"]["values"] == [100.0, 100.0]
    assert rows["120B-long prompt of 512 tokens"]["error"] == "no space left"
    assert rows["120B step, batch 16, no draft"]["values"] == [100.0, 100.0]
    assert set(result) >= {"command", "date", "gpu", "driver", "versions", "settings"}
    only = [*words, "--geometry", "20B", "--only", "20B step", "--check"]
    monkeypatch.setattr(gate, "build_engines", lambda _: {})
    assert gate.main([*only, "--against", str(output)]) == 0
    assert "missing" not in capsys.readouterr().out
