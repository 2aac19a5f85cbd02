"""The source of a kernel with everything that it includes, and one digest over all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

import specbuild.plugins_cuda as package
from specbuild.plugins_cuda.launches import Kernel
from specbuild.runtime.errors import SpecbuildError

PLUGINS = Path(next(iter(package.__path__)))
# A string, which is kept, or a comment.
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A file that is compiled with one set of constants; its entries share a cubin."""

    folder: str
    file: str
    constants: tuple[tuple[str, int | float | str], ...]

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return PLUGINS / self.folder / self.file

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.folder}/{self.file}"

    def definitions(self) -> tuple[str, ...]:
        """The struct of the constants as the compiler takes it; nothing where there are none."""
        if not self.constants:
            return ()
        members = (
            f"static constexpr {_type(value)} {_member(name)} = {_literal(value)};"
            for name, value in self.constants
        )
        return (f"-DCONFIG=struct Config {{ {' '.join(members)} }};",)

    def digest(self, compiler: Iterable[str]) -> str:
        """Changes with any byte of the file or its headers, a constant, or the compiler."""
        digest = xxhash.xxh3_128()
        for part in (*compiler, self.name, *self.definitions()):
            digest.update(part.encode() + b"\0")
        for path in included(self.path):
            digest.update(_read(path) + b"\0")
        return digest.hexdigest()


def source_of(kernel: Kernel) -> KernelSource:
    """What a kernel is compiled from."""
    return KernelSource(kernel.folder, kernel.file, kernel.constants)


def source_digest(name: str) -> str | None:
    """Changes with the code of a file ``<folder>/<file>`` and its headers; None without it.

    Comments, and where headers lie, do not count.
    """
    path = PLUGINS / name
    if not path.is_file():
        return None
    digest = xxhash.xxh3_128()
    for part in included(path):
        digest.update(_code(_read(part).decode()).encode() + b"\0")
    return digest.hexdigest()


def _code(text: str) -> str:
    """A source without comments, names of headers and blank lines."""
    text = _COMMENT.sub(lambda found: found[1] or " ", _INCLUDE.sub("#include", text))
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def included(path: Path) -> tuple[Path, ...]:
    """The file and the headers that it includes, each once, in the order of first inclusion."""
    found: dict[Path, None] = {path.resolve(): None}
    for name in _INCLUDE.findall(_read(path).decode()):
        found |= dict.fromkeys(included((path.parent / name).resolve()))
    return tuple(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecbuildError(
            f"the kernel source {path} cannot be read ({error.strerror}); install specbuild again"
        ) from error


def _type(value: int | float | str) -> str:
    return "float" if isinstance(value, float) else "int" if isinstance(value, int) else "auto"


def _member(name: str) -> str:
    """``kRingStages`` of ``RING_STAGES``."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _literal(value: int | float | str) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
