"""What MODEL names: an engine, a checkpoint on this machine, or a model on Hugging Face."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from specbuild.runtime.engine_dir.manifest import MANIFEST_FILE
from specbuild.runtime.errors import EngineFileError, SpecbuildError

GGUF_SUFFIX = ".gguf"
# ORGANISATION/NAME, optionally with a colon and a GGUF variant, as llama.cpp writes it.
_HUB = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<variant>[\w.-]+))?")
_MAX_ID_CHARACTERS = 96


@dataclass(frozen=True)
class EngineReference:
    """An engine directory."""

    path: Path

    @property
    def title(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name


@dataclass(frozen=True)
class CheckpointReference:
    """A checkpoint directory or a GGUF file; ``title`` is its name in messages."""

    path: Path
    title: str


@dataclass(frozen=True)
class HubReference:
    """A model on Hugging Face. ``variant`` selects a GGUF file, such as ``Q4_K_M``."""

    id: str
    variant: str | None = None

    @property
    def title(self) -> str:
        """The reference as a user writes it."""
        return self.id if self.variant is None else f"{self.id}:{self.variant}"


ModelReference: TypeAlias = EngineReference | CheckpointReference | HubReference


def model_reference(text: str) -> ModelReference:
    """Return what ``text`` names; a path that exists takes precedence over a Hugging Face id.

    Raises SpecbuildError for a path that does not exist, with the nearest name in its folder, and
    EngineFileError for a directory that is neither an engine nor a checkpoint, and for a path that
    cannot be opened.
    """
    path = Path(text)
    try:
        is_directory = path.is_dir()
    except OSError as error:  # a name that is too long, or a folder without permission
        raise EngineFileError(f"{text[:200]} cannot be opened: {error.strerror}") from None
    if is_directory:
        return _directory(path)
    if path.exists():
        if path.suffix != GGUF_SUFFIX and not _begins_as_gguf(path):
            raise EngineFileError(
                f"{path} is a file, not a directory, and no GGUF file; give an engine directory, "
                "a checkpoint directory, a GGUF file or a Hugging Face id"
            )
        return CheckpointReference(path, path.stem)
    hub = _HUB.fullmatch(text)
    near = nearest_path(path)
    is_local = near is not None or path.parent.exists() or path.suffix == GGUF_SUFFIX
    if hub is not None and len(hub["id"]) <= _MAX_ID_CHARACTERS and not is_local:
        return HubReference(hub["id"], hub["variant"])
    hint = "" if near is None else f"; did you mean {near}?"
    form = "; a Hugging Face id has the form ORGANISATION/NAME" if "/" not in text else ""
    raise EngineFileError(f"{path} does not exist{hint or form}")


def nearest_path(path: Path) -> Path | None:
    """Return the entry of the folder of ``path`` with the most similar name, if there is one."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return path.with_name(near[0]) if near else None


def _directory(path: Path) -> ModelReference:
    if (path / MANIFEST_FILE).exists():
        return EngineReference(path)
    title = path.resolve().name
    if (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return CheckpointReference(path, title)
    files = first_parts(sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}")))
    if len(files) == 1:
        return CheckpointReference(path / files[0], title)
    if files:
        raise SpecbuildError(f"{path} holds {len(files)} GGUF models: give one, {path / files[0]}")
    raise EngineFileError(
        f"{path} is neither an engine directory ({MANIFEST_FILE} is missing) nor a checkpoint "
        "(config.json is missing)"
    )


def first_parts(names: list[str]) -> list[str]:
    """Return the names of GGUF models: of a model that is split over files, the first file."""
    return [name for name in names if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", name)]


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
