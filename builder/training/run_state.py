"""An unfinished training run on disk: kept beside the output until the output is whole."""

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
# What training begins with where it is made, not given.
INITIAL_FILE = "initial.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """``<output>.training``: the optimiser's state, rows already generated, the finished files.

    Its fingerprint says what the run computes; a run with another one is not resumed.
    """

    path: Path

    @classmethod
    def open(cls, output: Path, *, fingerprint: str, resume: bool) -> RunFolder:
        """The folder of this run, made if it is new.

        Raises:
            SpecbuildError: the output exists, or there is an unfinished run, but no ``resume`` or
                one with other options.
        """
        folder = cls.of(output)
        if output.exists():
            folder._remove_finished(fingerprint)
            raise SpecbuildError(f"{output}: exists already; name another output or remove it")
        if folder._begun():
            folder._require_same(fingerprint, resume=resume)
            return folder
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecbuildError(f"{folder.path}: cannot be made: {error.strerror}") from error
        said = fingerprint.encode()
        _replace(folder.path / FINGERPRINT_FILE, lambda file: file.write_bytes(said))
        return folder

    def _begun(self) -> bool:
        """Whether the folder holds more than a run leaves that was killed before it began."""
        staged = staged_name(FINGERPRINT_FILE)
        return self.path.is_dir() and any(file.name != staged for file in self.path.iterdir())

    def _fingerprint(self) -> str | None:
        """What the run computes; None where nothing says it."""
        try:
            return (self.path / FINGERPRINT_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _remove_finished(self, fingerprint: str) -> None:
        """Takes away what a run left that was killed after its output was in place."""
        nothing = self.path.is_dir() and not self._begun()
        if nothing or self._fingerprint() == fingerprint:
            self._remove()

    def _remove(self) -> None:
        """Takes the folder away, and last of all what says whose it is."""
        for path in self.path.iterdir():
            if path.name != FINGERPRINT_FILE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self.path)

    def _require_same(self, fingerprint: str, *, resume: bool) -> None:
        if not resume:
            raise SpecbuildError(f"{self.path}: an unfinished run is there; resume it or remove it")
        if self._fingerprint() != fingerprint:
            raise SpecbuildError(
                f"{self.path}: the unfinished run there has other options; "
                "give those again or remove it"
            )

    @classmethod
    def of(cls, output: Path) -> RunFolder:
        """The folder that a run with this output has."""
        return cls(output.with_name(f"{output.name}.training"))

    def remove_unbegun(self, *besides: str) -> None:
        """Takes a folder away in which nothing was done yet: a run that is refused leaves none.

        ``besides``: files that say no more than the options do.
        """
        nothing = {FINGERPRINT_FILE, *besides}
        if self.path.is_dir() and {f.name for f in self.path.iterdir()} <= nothing:
            shutil.rmtree(self.path)

    def load(self) -> dict[str, Any] | None:
        """The last state saved; None at the start.

        Raises:
            SpecbuildError: it is damaged.
        """
        file = self.path / STATE_FILE
        if not file.exists():
            return None
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its readers raise
            raise SpecbuildError(f"{file}: damaged; remove {self.path} and start anew") from error
        return dict(state)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state as a whole."""
        _replace(self.path / STATE_FILE, lambda file: torch.save(state, file))

    def rows(self, name: str, make: Callable[[], Rows]) -> Rows:
        """The rows that ``make`` makes, kept so that a resumed run does not make them again."""
        file = self.path / f"{name}.npz"
        if file.exists():
            with np.load(file, allow_pickle=False) as stored:
                return Rows(stored["ids"], stored["counted"])
        rows = make()

        def write(temporary: Path) -> None:
            with temporary.open("wb") as opened:
                np.savez_compressed(opened, ids=rows.ids, counted=rows.counted)

        _replace(file, write)
        return rows

    def publish(self, write: Callable[[Path], None], output: Path) -> None:
        """Let ``write`` fill a folder, move it to ``output``, and end the run."""
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
            raise SpecbuildError(f"{output}: cannot be written: {error.strerror}") from error
        self._remove()


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """As ``replace_file``; SpecbuildError where the disk refuses."""
    try:
        replace_file(file, write)
    except (OSError, RuntimeError) as error:
        raise SpecbuildError(f"{file}: cannot be written: {error}") from error
