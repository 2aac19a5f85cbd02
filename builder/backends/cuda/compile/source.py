"""The source of a kernel with all included headers, and a digest over them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xxhash

import specbuild.plugins_cuda as package
from specbuild.plugins_cuda.launches import Kernel
from specbuild.runtime.errors import SpecbuildError

PLUGINS = Path(next(iter(package.__path__)))
# A string, which stays, or a comment.
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
        """The path of the file."""
        return PLUGINS / self.folder / self.file

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.folder}/{self.file}"

    def definitions(self) -> tuple[str, ...]:
        """Return the compiler option for the struct of constants; none without constants."""
        if not self.constants:
            return ()
        members = (
            f"static constexpr {_type(value)} {_member(name)} = {_literal(value)};"
            for name, value in self.constants
        )
        return (f"-DCONFIG=struct Config {{ {' '.join(members)} }};",)

    def digest(self, compiler: Iterable[str]) -> str:
        """Return a digest of the compiler, the constants, and all bytes of file and headers."""
        digest = xxhash.xxh3_128()
        for part in (*compiler, self.name, *self.definitions()):
            digest.update(part.encode() + b"\0")
        for data in _contents(self.path).values():
            digest.update(data + b"\0")
        return digest.hexdigest()


def source_of(kernel: Kernel) -> KernelSource:
    """Return the source of a kernel."""
    return KernelSource(kernel.folder, kernel.file, kernel.constants)


def source_digest(name: str) -> str | None:
    """Return a digest of the code of ``<folder>/<file>`` and its headers; None without the file.

    Comments and the paths of headers are ignored.
    """
    path = PLUGINS / name
    if not path.is_file():
        return None
    digest = xxhash.xxh3_128()
    for data in _contents(path).values():
        digest.update(_code(data.decode()).encode() + b"\0")
    return digest.hexdigest()


def _code(text: str) -> str:
    """Return a source without comments, names of headers and blank lines."""
    text = _COMMENT.sub(lambda match: match[1] or " ", _INCLUDE.sub("#include", text))
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def included(path: Path) -> tuple[Path, ...]:
    """Return the file and the headers that it includes, once each, in the order of inclusion."""
    return tuple(_contents(path))


def _contents(path: Path) -> dict[Path, bytes]:
    """Return the bytes of the file and of its headers, in the order of inclusion.

    Each is read once, because most headers are included by several others.
    """
    contents: dict[Path, bytes] = {}

    def visit(file: Path) -> None:
        if file in contents:
            return
        contents[file] = data = _read(file)
        for name in _names_of_headers(data):
            visit(Path(os.path.normpath(file.parent / name)))

    visit(path.resolve())
    return contents


@cache
def _names_of_headers(code: bytes) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(code.decode()))


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
    """Return the C++ name of a constant: ``kRingStages`` for ``RING_STAGES``."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _literal(value: int | float | str) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
