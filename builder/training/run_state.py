"""The files of an unfinished training run, which lie beside the output until it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbuild.builder.durable import fsync, replace_file, staged_name
from specbuild.builder.training.corpus import Rows
from specbuild.runtime.errors import SpecbuildError

STATE_FILE = "state.pt"
FINGERPRINT_FILE = "fingerprint.txt"
# Initial weights that the run computed, if no option supplied them.
INITIAL_FILE = "initial.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """``<output>.training``: the saved state, generated rows, and the finished files.

    Its fingerprint is that of the options. A run with another fingerprint cannot resume.
    """

    path: Path

    @classmethod
    def open(cls, output: Path, *, fingerprint: str, resume: bool) -> RunFolder:
        """Return the folder of this run; create it if it is new.

        Raises:
            SpecbuildError: the output exists, or there is an unfinished run without ``resume`` or
                with other options.
        """
        folder = cls.of(output)
        if output.exists():
            folder._remove_finished(fingerprint)
            raise SpecbuildError(f"{output}: the output exists; use another output or remove it")
        if folder._has_progress():
            folder._require_same(fingerprint, resume=resume)
            return folder
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecbuildError(
                f"{folder.path}: cannot create the directory: {error.strerror}"
            ) from error
        content = fingerprint.encode()
        _replace(folder.path / FINGERPRINT_FILE, lambda file: file.write_bytes(content))
        return folder

    def _has_progress(self) -> bool:
        """Return whether the folder has more files than a run killed at its beginning leaves."""
        staged = staged_name(FINGERPRINT_FILE)
        return self.path.is_dir() and any(file.name != staged for file in self.path.iterdir())

    def _fingerprint(self) -> str | None:
        """Return the fingerprint of the run in the folder; None if there is none."""
        try:
            return (self.path / FINGERPRINT_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _remove_finished(self, fingerprint: str) -> None:
        """Remove the files of a run that was killed after it wrote its output."""
        is_empty = self.path.is_dir() and not self._has_progress()
        if is_empty or self._fingerprint() == fingerprint:
            self._remove()

    def _remove(self) -> None:
        """Remove the folder, and the fingerprint last, because it identifies the run."""
        for path in self.path.iterdir():
            if path.name != FINGERPRINT_FILE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self.path)

    def _require_same(self, fingerprint: str, *, resume: bool) -> None:
        if not resume:
            raise SpecbuildError(f"{self.path}: has an unfinished run; resume it or remove it")
        if self._fingerprint() != fingerprint:
            raise SpecbuildError(
                f"{self.path}: the unfinished run has other options; use the same options or "
                "remove the directory"
            )

    @classmethod
    def of(cls, output: Path) -> RunFolder:
        """Return the folder of a run with this output."""
        return cls(output.with_name(f"{output.name}.training"))

    def remove_unused(self, *besides: str) -> None:
        """Remove a folder without progress, so that a refused run leaves none.

        ``besides`` are files that contain nothing but the options.
        """
        initial_files = {FINGERPRINT_FILE, *besides}
        if self.path.is_dir() and {f.name for f in self.path.iterdir()} <= initial_files:
            shutil.rmtree(self.path)

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state; None at the beginning.

        Raises:
            SpecbuildError: the state is damaged.
        """
        file = self.path / STATE_FILE
        if not file.exists():
            return None
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load documents no exceptions
            raise SpecbuildError(
                f"{file}: is damaged; remove {self.path} and start again"
            ) from error
        return dict(state)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state atomically."""
        _replace(self.path / STATE_FILE, lambda file: torch.save(state, file))

    def rows(self, name: str, make: Callable[[], Rows]) -> Rows:
        """Return the rows of ``make``; save them, so that a resumed run does not repeat it."""
        file = self.path / f"{name}.npz"
        if file.exists():
            with np.load(file, allow_pickle=False) as stored:
                return Rows(stored["ids"], stored["counted"])
        rows = make()

        def write(temporary: Path) -> None:
            with temporary.open("wb") as stream:
                np.savez_compressed(stream, ids=rows.ids, counted=rows.counted)

        _replace(file, write)
        return rows

    def publish(self, write: Callable[[Path], None], output: Path) -> None:
        """Call ``write`` on a folder, move it to ``output``, and remove the run's folder."""
        finished = self.path / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        try:
            finished.mkdir()
            write(finished)
            for file in finished.iterdir():
                fsync(file)
            fsync(finished)
            finished.rename(output)
            fsync(output.parent)
        except OSError as error:
            raise SpecbuildError(
                f"{output}: cannot write the directory: {error.strerror}"
            ) from error
        self._remove()


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Call ``replace_file``; raise SpecbuildError if the disk refuses."""
    try:
        replace_file(file, write)
    except (OSError, RuntimeError) as error:
        raise SpecbuildError(f"{file}: cannot write the file: {error}") from error
