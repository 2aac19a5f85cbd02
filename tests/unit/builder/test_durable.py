"""Folders take their place at once, whatever the system offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder import durable
from specbuild.builder.engine_writer import EngineFolder
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


def test_bytes_that_read_back_otherwise_are_noticed(tmp_path: Path) -> None:
    """traps.md: success is a file re-read, not a write that raised nothing."""
    folder = EngineFolder(tmp_path)
    folder.write("graphs/target.onnx", b"as it was written")
    assert folder.stored_files()["graphs/target.onnx"].bytes == 17
    (tmp_path / "graphs" / "target.onnx").write_bytes(b"as it came back ")
    with pytest.raises(SpecbuildError, match="reads back other than it was written"):
        folder.stored_files()


def test_what_a_killed_build_put_aside_has_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames of a system that exchanges nothing there is no engine."""
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


def test_a_refused_rename_leaves_the_folder_before(
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
