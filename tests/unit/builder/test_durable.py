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
