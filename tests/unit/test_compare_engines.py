"""Comparing engines: differences, allowed differences, and notes."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import BENCHMARKS, script_modules

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with script_modules(BENCHMARKS, "compare_engines", "engine_files") as modules:
        yield modules["compare_engines"]


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def record(name: str, code: bytes) -> dict[str, str]:
    """Return the fields of a plugin."""
    kernel = {"name": f"{name}/kernel.cu:entry", "cubin": f"{name}.cubin", "entry": "entry"}
    packed = base64.b85encode(zlib.compress(code)).decode()
    description = {"kernels": [kernel], "buckets": [{"grid": [4, 1, 1]}]}
    return {
        "description": json.dumps(description),
        "cubins": json.dumps({f"{name}.cubin": packed}),
    }


def write_engine(folder: Path) -> Path:
    """Write a CUDA engine of two kernels and one program, including a TensorRT engine's files."""
    write_json(folder / "manifest.json", {"format_version": 2, "files": {"a": {"bytes": 1}}})
    write_json(folder / "build_report.json", {"passes": [{"name": "fuse"}]})
    (folder / "manifest.sha256").write_text("0")
    for name in ("first", "second"):
        cubin = folder / "kernels" / f"{name}.cubin"
        cubin.parent.mkdir(exist_ok=True)
        cubin.write_bytes(b"\x7fELF" + name.encode())
    kernels = [
        {"name": f"{n}/kernel.cu:go", "cubin": f"kernels/{n}.cubin", "entry": "go", "registers": 18}
        for n in ("first", "second")
    ]
    entry = {"name": "step@1", "file": "programs/step@1.json", "kind": "step", "launches": 2}
    buffers = [{"name": "arena", "space": "arena", "bytes": 512}]
    plan = {"gpu": "sm_90a", "buffers": buffers, "kernels": kernels, "programs": [entry]}
    write_json(folder / "plan.json", plan)
    launches = [
        {"kernel": k, "op": 0, "grid": [8, 1, 1], "block": 256, "shared_bytes": 0,
         "arguments": [[0, 0, 256], [1, 64]], "programmatic": True}
        for k in (0, 1)
    ]  # fmt: skip
    ops = [{"op": "Embed", "inputs": {"x": {"buffer": 0, "offset": 256}}}]
    write_json(folder / "programs/step@1.json", {"ops": ops, "launches": launches})
    (folder / "weights.safetensors").write_bytes(bytes(64))
    (folder / "graphs").mkdir()
    (folder / "graphs" / "target.onnx").write_bytes(b"graph")
    write_json(folder / "accept.launches.json", {"records": [record("accept", b"code")]})
    node = {"op": "Plugin", "attributes": record("linear", b"more code")}
    (folder / "target.engine").write_bytes(bytes(64) + json.dumps({"nodes": [node]}).encode())
    return folder


def edited(file: str, *keys: str | int, value: Any) -> Change:
    """Return a function that sets ``value`` at ``keys`` of a JSON file."""

    def change(engine: Path) -> None:
        result = document = json.loads((engine / file).read_text())
        for key in keys[:-1]:
            result = result[key]
        result[keys[-1]] = value
        write_json(engine / file, document)

    return change


def flipped(file: str) -> Change:
    """Return a function that flips a bit of a file's last byte."""

    def change(engine: Path) -> None:
        data = bytearray((engine / file).read_bytes())
        data[-1] ^= 1
        (engine / file).write_bytes(data)

    return change


def renamed_code(engine: Path) -> None:
    """Change every name that may differ: of kernels, cubins, buffers, ops and programs."""
    (engine / "kernels" / "first.cubin").rename(engine / "kernels" / "third.cubin")
    (engine / "programs" / "step@1.json").rename(engine / "programs" / "one.json")
    edited("plan.json", "kernels", 0, "cubin", value="kernels/third.cubin")(engine)
    edited("plan.json", "kernels", 0, "name", value="third/kernel.cu:go")(engine)
    edited("plan.json", "programs", 0, "file", value="programs/one.json")(engine)
    edited("plan.json", "programs", 0, "name", value="one")(engine)
    edited("plan.json", "buffers", 0, "name", value="scratch")(engine)
    edited("programs/one.json", "ops", 0, "op", value="Lookup")(engine)
    edited("programs/one.json", "ops", 0, "traffic", value={"bytes": 5})(engine)
    write_json(engine / "accept.launches.json", {"records": [record("took", b"code")]})
    node = {"op": "Plugin", "attributes": record("line", b"more code")}
    (engine / "target.engine").write_bytes(
        bytes(60) + b"head" + json.dumps({"nodes": [node]}).encode()
    )


def reported_changes(engine: Path) -> None:
    """Change data that is reported without being a failure."""
    edited("manifest.json", "format_version", value=3)(engine)
    edited("build_report.json", "passes", 0, "name", value="join")(engine)
    (engine / "manifest.sha256").write_text("1")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_engine(tmp_path / "old" / "e"), write_engine(tmp_path / "new" / "e")


def differences(script: ModuleType, pair: tuple[Path, Path], *allowed: str) -> list[str]:
    (result,) = script.compare(*pair, script.Rules((*script.LEFT_OUT, *allowed)))
    return list(result.wrong)


@pytest.mark.parametrize("change", [lambda _: None, renamed_code, reported_changes])
def test_allowed_changes_are_no_differences(
    script: ModuleType, pair: tuple[Path, Path], change: Change
) -> None:
    change(pair[1])
    assert differences(script, pair) == []


LAUNCH = ("programs/step@1.json", "launches", 1)
CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a byte of a cubin": (
        flipped("kernels/second.cubin"),
        ("plan.kernels[1].cubin", "second/kernel.cu:go): its code is only in the old"),
    ),
    "another kernel": (edited(*LAUNCH, "kernel", value=0), ("program.launches[1].kernel: 1 → 0",)),
    "a grid": (edited(*LAUNCH, "grid", 0, value=9), ("program.launches[1].grid[0]: 8 → 9",)),
    "a block": (edited(*LAUNCH, "block", value=128), ("launches[1].block: 256 → 128",)),
    "shared memory": (edited(*LAUNCH, "shared_bytes", value=1), ("launches[1].shared_bytes",)),
    "an argument": (edited(*LAUNCH, "arguments", 1, 1, value=65), ("arguments[1][1]: 64 → 65",)),
    "fewer arguments": (edited(*LAUNCH, "arguments", value=[]), ("arguments.length: 2 → 0",)),
    "a number's type": (edited(*LAUNCH, "programmatic", value=1), ("programmatic: True → 1",)),
    "an offset": (
        edited("programs/step@1.json", "ops", 0, "inputs", "x", "offset", value=0),
        ("program.ops[0].inputs.x.offset: 256 → 0",),
    ),
    "a buffer": (edited("plan.json", "buffers", 0, "bytes", value=1), ("plan.buffers[0].bytes",)),
    "a new field": (edited("plan.json", "programs", 0, "x", value=0), ("x: absent → 0",)),
    "fewer programs": (edited("plan.json", "programs", value=[]), ("plan.programs.length: 1 → 0",)),
    "no plan": (lambda e: (e / "plan.json").unlink(), ("plan.gpu: 'sm_90a' → absent",)),
    "weights": (flipped("weights.safetensors"), ("weights.safetensors: its bytes differ",)),
    "a graph": (flipped("graphs/target.onnx"), ("graphs/target.onnx: its bytes differ",)),
    "no graph": (
        lambda e: (e / "graphs/target.onnx").unlink(),
        ("graphs/target.onnx: only in the old",),
    ),
    "a plugin's code": (
        lambda e: write_json(e / "accept.launches.json", {"records": [record("accept", b"?")]}),
        ("launches.records[0].record.kernels[0].cubin", "launches.records[0].codes[0]"),
    ),
    "a plugin's op": (
        lambda e: (e / "target.engine").write_bytes(
            bytes(64)
            + json.dumps(
                {"nodes": [{"op": "Q", "attributes": record("linear", b"more code")}]}
            ).encode()
        ),
        ("engine.nodes[0].op: 'Plugin' → 'Q'",),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_reports_a_change_with_its_location(
    script: ModuleType, pair: tuple[Path, Path], name: str
) -> None:
    change, places = CHANGES[name]
    change(pair[1])
    result = "\n".join(differences(script, pair))
    for place in places:
        assert place in result


def test_an_allowed_field_is_ignored_with_its_children(
    script: ModuleType, pair: tuple[Path, Path]
) -> None:
    edited(*LAUNCH, "grid", 0, value=9)(pair[1])
    edited(*LAUNCH, "block", value=9)(pair[1])
    (left,) = differences(script, pair, "program.launches.grid")
    assert left.endswith("program.launches[1].block: 256 → 9")


def test_a_renamed_field_is_compared_under_its_new_key(
    script: ModuleType, pair: tuple[Path, Path]
) -> None:
    edited("plan.json", "programs", 0, "narrows", value=False)(pair[0])
    edited("plan.json", "programs", 0, "sparse", value=False)(pair[1])
    rules = script.Rules(renamed={"plan.programs.narrows": "sparse"})
    assert len(differences(script, pair)) == 2
    assert script.compare(*pair, rules)[0].wrong == []
    edited("plan.json", "programs", 0, "sparse", value=True)(pair[1])
    (result,) = script.compare(*pair, rules)[0].wrong
    assert result.endswith("plan.programs[0].sparse: False → True")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_engines.py", *map(str, arguments)])
    return int(script.main())


def test_folders_are_compared_engine_by_engine(
    script: ModuleType,
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = (engine.parent for engine in pair)
    reported_changes(pair[1])
    assert run(script, monkeypatch, old, new) == 0
    output = capsys.readouterr().out
    assert "manifest.format_version: 2 → 3" in output
    assert "build_report.passes[0].name: 'fuse' → 'join'" in output
    name, files, _, *rest = output.splitlines()[-1].split()
    assert [name, files, *rest] == ["e", "4", "2", "1", "2", "equal"]
    shutil.copytree(pair[0], new / "more")
    assert run(script, monkeypatch, old, new) == 1
    assert "more: DIFFERS\n  the engine is only in the new" in capsys.readouterr().out


def test_rejects_engines_that_cannot_be_compared(
    script: ModuleType,
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = pair[0] / "graphs"
    cases = [
        ((empty, pair[1].parent), "neither an engine nor a folder of engines"),
        ((*pair, "--allow", "grid"), "a field begins with one of plan., program."),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as stopped:
            run(script, monkeypatch, *arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    (pair[1] / "kernels" / "first.cubin").unlink()
    with pytest.raises(ValueError, match=r"kernels/first\.cubin, which is missing"):
        differences(script, pair)
