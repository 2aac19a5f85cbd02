"""The advice for an engine of another version: the command that rebuilds it, or an update."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.drafters.record import ModelRecord
from specbuild.runtime.engine_dir.drafters.registry import RECORDS
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.strict_json import brief, to_json
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError

_MAX_VALUE_CHARACTERS = 100


def check_version(directory: Path, where: Path, decoded: Any) -> None:
    """Raise EngineFileError if a decoded manifest has another format than this runtime's."""
    version = decoded.get("format_version") if isinstance(decoded, dict) else None
    if type(version) is int and version == FORMAT_VERSION:
        return
    # Imported here because it takes longer than the other modules of a manifest.
    import importlib.metadata

    own = importlib.metadata.version("specbuild")
    if type(version) is int and version > FORMAT_VERSION:
        raise EngineFileError(
            f"{where} is of format version {brief(version)}, of a newer specbuild"
            f"{_built_by(decoded)}; this one ({own}) reads {FORMAT_VERSION}: update specbuild"
        )
    raise OutdatedEngineError(
        f"{where} is of format version {brief(version)}{_built_by(decoded)}, specbuild {own} "
        f"reads {FORMAT_VERSION}",
        build_command(directory, decoded),
    )


def build_command(directory: Path, decoded: Any) -> str:
    """Return the command that rebuilds an engine, with the options in its manifest.

    A manifest has no paths: checkpoint and drafts are placeholders. ``decoded`` may be of any
    version, or damaged: unexpected parts are omitted.
    """
    fields = decoded if isinstance(decoded, dict) else {}
    words = ["specbuild", "build", "--model", "CHECKPOINT"]
    drafters = fields.get("drafters")
    for drafter in drafters if isinstance(drafters, list) else ():
        if isinstance(drafter, dict):
            kind = drafter.get("kind")
            record = RECORDS.get(kind, ModelRecord) if isinstance(kind, str) else ModelRecord
            words += ["--draft", record.BUILD_ARGUMENT] if record.BUILD_ARGUMENT else []
    words += ["--output", str(directory)]
    if isinstance(backend := fields.get("backend"), str) and backend.isprintable():
        words += ["--backend", backend[:_MAX_VALUE_CHARACTERS]]
    if isinstance(ranks := fields.get("ranks"), int) and ranks > 1:
        words += ["--tensor-parallel", str(ranks)]
    options = fields.get("options")
    for name, value in sorted(options.items()) if isinstance(options, dict) else ():
        words += _option(name, value)
    return shlex.join([*words, "--force"])


@contextmanager
def naming_build_command(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Add the command to each OutdatedEngineError that has none."""
    try:
        yield
    except OutdatedEngineError as error:
        if error.command is None:
            error.command = build_command(directory, to_json(manifest))
        raise


def _option(name: str, value: Any) -> Iterator[str]:
    """Return the words of one recorded option; none for its default, null or false."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False or not name.isidentifier() or not name.isascii():
        # The only flag without a default: its absence means neither.
        if value is False and name == "dsa":
            yield "--no-dsa"
        return
    if value is True:
        yield flag
        return
    for item in value if isinstance(value, list) else [value]:
        text = str(item) if isinstance(item, str | int | float) else ""
        if text and text.isprintable() and len(text) <= _MAX_VALUE_CHARACTERS:
            yield from (flag, text)


def _built_by(decoded: Any) -> str:
    version = decoded.get("specbuild_version") if isinstance(decoded, dict) else None
    short = isinstance(version, str) and version.isprintable() and len(version) <= 40
    return f" (specbuild {version})" if short else ""
