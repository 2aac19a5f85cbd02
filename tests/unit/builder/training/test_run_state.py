"""The folder of an unfinished run: resumed with equal options, removed if it is empty."""

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
    """This holds even before the first save: rows and first factors belong to the run."""
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
def test_a_folder_without_options_is_not_resumed(tmp_path: Path, name: str) -> None:
    folder = RunFolder.of(tmp_path / "out")
    folder.path.mkdir()
    (folder.path / name).write_bytes(b"\xff")
    with pytest.raises(SpecbuildError, match="has other options"):
        RunFolder.open(tmp_path / "out", fingerprint="a", resume=True)


def test_only_an_empty_run_is_removed(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    folder.remove_unused()
    assert not folder.path.exists()
    folder = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    folder.rows("train", lambda: rows(1))
    folder.remove_unused()
    assert folder.path.exists()


def test_a_run_that_was_killed_at_its_start_can_be_started(tmp_path: Path) -> None:
    folder = RunFolder.of(tmp_path / "out")
    folder.path.mkdir()
    (folder.path / ".fingerprint.txt.new").write_bytes(b"a")
    again = RunFolder.open(tmp_path / "out", fingerprint="a", resume=False)
    assert [file.name for file in again.path.iterdir()] == ["fingerprint.txt"]


@pytest.mark.parametrize("fingerprint", ["a", "b", None])
def test_the_folder_of_a_finished_run_is_removed(tmp_path: Path, fingerprint: str | None) -> None:
    """A run with the same options removes it; with None, only the folder is left."""
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
