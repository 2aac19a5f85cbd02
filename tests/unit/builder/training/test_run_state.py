"""The folder of an unfinished run: resumed with the same options only, gone where nothing began."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.run_state import RunFolder
from specbuild.runtime.errors import SpecbuildError


def rows(fill: int) -> Rows:
    return Rows(np.full((1, 2), fill, np.int32), np.ones((1, 2), bool))


def test_a_run_with_other_options_is_not_resumed(tmp_path: Path) -> None:
    """Not even before its first state is saved: rows and first factors are the run's own."""
    output = tmp_path / "out"
    folder = RunFolder.open(output, fingerprint="a", resume=False)
    assert folder.rows("train", lambda: rows(1)).ids[0, 0] == 1
    with pytest.raises(SpecbuildError, match="has an unfinished run; resume it or remove it"):
        RunFolder.open(output, fingerprint="a", resume=False)
    with pytest.raises(SpecbuildError, match="has other options; use the same options"):
        RunFolder.open(output, fingerprint="b", resume=True)
    again = RunFolder.open(output, fingerprint="a", resume=True)
    assert again.rows("train", lambda: pytest.fail("made again")).ids[0, 0] == 1
    again.save({"step": 3})
    assert again.load() == {"step": 3}


@pytest.mark.parametrize("name", ["state.pt", "fingerprint.txt"])
def test_a_folder_that_does_not_say_its_options_is_not_resumed(tmp_path: Path, name: str) -> None:
    folder = RunFolder.of(tmp_path / "out")
    folder.path.mkdir()
    (folder.path / name).write_bytes(b"\xff")
    with pytest.raises(SpecbuildError, match="has other options"):
        RunFolder.open(tmp_path / "out", fingerprint="a", resume=True)


def test_only_a_run_that_did_nothing_is_removed(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    folder.remove_unused()
    assert not folder.path.exists()
    folder = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    folder.rows("train", lambda: rows(1))
    folder.remove_unused()
    assert folder.path.exists()


def test_a_run_that_was_killed_before_it_began_begins(tmp_path: Path) -> None:
    folder = RunFolder.of(tmp_path / "out")
    folder.path.mkdir()
    (folder.path / ".fingerprint.txt.new").write_bytes(b"a")
    again = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    assert [file.name for file in again.path.iterdir()] == ["fingerprint.txt"]


@pytest.mark.parametrize("fingerprint", ["a", "b", None])
def test_what_a_finished_run_left_is_removed(tmp_path: Path, fingerprint: str | None) -> None:
    """By whoever asks for the same again; None: all but the folder is gone already."""
    folder = RunFolder.of(tmp_path / "out")
    if fingerprint is None:
        folder.path.mkdir()
    else:
        folder = RunFolder.open(tmp_path / "out", fingerprint=fingerprint, resume=False)
        folder.save({"step": 3})
    (tmp_path / "out").mkdir()
    with pytest.raises(SpecbuildError, match="the output exists"):
        RunFolder.open(tmp_path / "out", fingerprint="a", resume=True)
    assert folder.path.exists() == (fingerprint == "b")
