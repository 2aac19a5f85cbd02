"""Folders are replaced atomically, with any of the system's calls."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbuild.builder import durable
from specbuild.builder.checkpoint.source import read_header
from specbuild.builder.engine.writer import EngineFolder, require_replaceable
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.progress import SilentProgress
from specbuild.cli.main import main
from specbuild.runtime.engine_dir.files import manifest_digest
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(durable, "_exchanged", lambda *_: False)
    output = tmp_path / "engine"
    for content in ("old", "new"):
        staging = durable.staging_folder(output)
        durable.write_bytes(staging / "graphs" / "file", content.encode())
        durable.put_in_place(staging, output)
        assert (output / "graphs" / "file").read_text() == content
        assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_detects_bytes_that_differ_when_read_back(tmp_path: Path) -> None:
    """A write succeeds only if the file can be read back."""
    folder = EngineFolder(tmp_path)
    folder.write("graphs/target.onnx", b"as it was written")
    assert folder.stored_files()["graphs/target.onnx"].bytes == 17
    (tmp_path / "graphs" / "target.onnx").write_bytes(b"as it came back ")
    with pytest.raises(SpecbuildError, match="reads back other than it was written"):
        folder.stored_files()


def test_restores_the_engine_that_a_killed_build_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On systems without an exchange, there is no engine between the two renames."""
    monkeypatch.setattr(durable, "_exchanged", lambda *_: False)
    monkeypatch.setattr(durable, "_alive", lambda _: False)
    output = tmp_path / "engine[1]"
    durable.write_bytes(output / "file", b"old")
    aside = durable.staging_folder(output)
    output.rename(aside.with_name(f"{aside.name}-old"))
    staging = durable.staging_folder(output)
    assert (output / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([staging.name, output.name])
    durable.staging_folder(output)
    assert not staging.exists(), "what is not put aside is removed"


def test_a_failed_rename_leaves_the_previous_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_exchanged", lambda *_: False)
    output = tmp_path / "engine"
    durable.write_bytes(output / "file", b"old")
    staging, rename = durable.staging_folder(output), Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path == staging:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Input/output"):
        durable.put_in_place(staging, output)
    assert (output / "file").read_text() == "old"


def test_weights_begin_at_a_multiple_of_64_bytes(tmp_path: Path) -> None:
    folder = EngineFolder(tmp_path)
    for name in ("w", "a.longer.name", "one.that.is.longer.still"):
        recipe = Recipe((3,), torch.float32, (name,), lambda: torch.rand(3))
        folder.write_weights({name: recipe}, SilentProgress())
        source = read_header(tmp_path / "weights.safetensors")[name]
        assert source.offset is not None and source.offset % 64 == 0


def test_force_replaces_an_empty_folder(tmp_path: Path) -> None:
    require_replaceable(tmp_path, force=True)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(SpecbuildError, match="is no engine"):
        require_replaceable(tmp_path, force=True)


def engine_of(folder: Path, **manifest: object) -> None:
    """Create a directory that describes itself as an engine."""
    folder.mkdir()
    data = json.dumps({"format_version": 1, "files": {"a/weights": {}}} | manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_text(manifest_digest(data))


def test_force_replaces_engines_of_any_version_only(tmp_path: Path) -> None:
    """A manifest.json is not sufficient: web pages and packages have one too."""
    engine_of(tmp_path / "e")
    require_replaceable(tmp_path / "e", force=True)
    (tmp_path / "e" / "a").mkdir()
    (tmp_path / "e" / "a" / "weights").write_bytes(b"")
    (tmp_path / "e" / "manifest.sig").write_bytes(b"")
    require_replaceable(tmp_path / "e", force=True)
    other = tmp_path / "other"
    for place in ("mine.txt", "a/mine.txt", "b/mine.txt", ".git/config"):
        shutil.copytree(tmp_path / "e", other)
        (other / place).parent.mkdir(exist_ok=True)
        (other / place).write_text("kept")
        with pytest.raises(SpecbuildError, match="is no engine"):
            require_replaceable(other, force=True)
        shutil.rmtree(other)
    for name, fields in (
        ("page", {"format_version": None}),
        ("list", {"files": ["a"]}),
        ("text", {"format_version": "3"}),
    ):
        engine_of(tmp_path / name, **fields)
        with pytest.raises(SpecbuildError, match="is no engine"):
            require_replaceable(tmp_path / name, force=True)
    (tmp_path / "e" / "manifest.sha256").unlink()
    with pytest.raises(SpecbuildError, match="is no engine"):
        require_replaceable(tmp_path / "e", force=True)


@pytest.mark.parametrize(
    "place", ["mine.txt", "target/mine.txt", "draft/old/model.safetensors", "synth.json"]
)
def test_force_of_synth_does_not_replace_other_folders(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m"
    (output / "target").mkdir(parents=True)
    (output / "synth.json").write_text('{"options": {}, "distinct_experts": []}')
    (output / "target" / "model.safetensors").write_text("")
    words = ["synth", "--geometry", "tiny", "--layers", "2", "--output", str(output), "--force"]
    (output / place).parent.mkdir(parents=True, exist_ok=True)
    (output / place).write_text("{}")
    assert main(words) == 2
    assert "was not written by synth" in capsys.readouterr().err
    assert (output / place).read_text() == "{}"


def test_the_running_build_of_another_user_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = tmp_path / f".e.building-{socket.gethostname()}-4711-x"
    running.mkdir()

    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    durable.staging_folder(tmp_path / "e")
    assert running.is_dir()


_REPLACE = """
import sys, pathlib
from specbuild.builder.durable import replace_bytes
file, letter = pathlib.Path(sys.argv[1]), sys.argv[2]
for _ in range(200):
    replace_bytes(file, letter.encode() * 4096)
"""


def test_processes_that_replace_one_file_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    words = [sys.executable, "-c", _REPLACE, str(file)]
    writers = [subprocess.Popen([*words, letter], stderr=subprocess.PIPE) for letter in "abc"]
    messages = [writer.communicate(timeout=120)[1].decode() for writer in writers]
    assert messages == [""] * 3
    assert file.read_bytes() in {letter * 4096 for letter in (b"a", b"b", b"c")}
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
