"""The advice for an engine of another version: the command that rebuilds it, or an update."""

from __future__ import annotations

import re
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
from specbuild.runtime.errors import EngineFileError

_MAX_VALUE_CHARACTERS = 100
# The ends of messages about engines that another version built. A damaged engine may also be
# copied again, so those messages do not match.
_ADVICE = re.compile(r"; (?:build (?:the engine|it) again|rebuild (?:the engine|it))$")


def version_problem(directory: Path, where: Path, decoded: Any) -> str | None:
    """Return the advice if a decoded manifest has another format than this runtime's, else None."""
    version = decoded.get("format_version") if isinstance(decoded, dict) else None
    if type(version) is int and version == FORMAT_VERSION:
        return None
    # Imported here because it takes longer than the other modules of a manifest.
    import importlib.metadata

    own = importlib.metadata.version("specbuild")
    if type(version) is int and version > FORMAT_VERSION:
        return (
            f"{where} is of format version {brief(version)}, of a newer specbuild"
            f"{_built_by(decoded)}; this one ({own}) reads {FORMAT_VERSION}: update specbuild"
        )
    return (
        f"{where} is of format version {brief(version)}{_built_by(decoded)}, specbuild {own} "
        f"reads {FORMAT_VERSION}; {build_again(directory, decoded)}"
    )


def build_again(directory: Path, decoded: Any) -> str:
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
    return f"build the engine again: {shlex.join([*words, '--force'])}"


@contextmanager
def naming_build_command(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Add the command to each EngineFileError whose advice is to build the engine again."""
    try:
        yield
    except EngineFileError as error:
        problem, changes = _ADVICE.subn("", str(error))
        if not changes:
            raise
        raise EngineFileError(f"{problem}; {build_again(directory, to_json(manifest))}") from error


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
