"""Machine code from NVRTC for tests: compiled once and kept in the content store, or archived.

It depends on the source, its headers, the options and the compiler's version.

An archive replaces the compiler on a machine with an older NVRTC, or without one. This command
writes every kernel of a content store (``SPECBUILD_TEST_STORE``) to one ``.tar.xz`` file:

    python tests/shared_cubins.py pack STORE ARCHIVE
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from content_store import content_store, digest
from run_store import made_once, shared_folder

from specbuild.builder.backends.cuda.compile import nvrtc
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, Cubin, Resources
from specbuild.builder.backends.cuda.compile.source import KernelSource
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.errors import SpecbuildError

ROOT = Path(__file__).parents[1]
ARCHIVE = "SPECBUILD_GPU_CUBINS"
DEFAULT_ARCHIVE = ROOT / "out" / "gpu-cubins.tar.xz"
KIND, SUFFIX = "cubins", ".cubin"
_VERSION = "nvrtc.json"
Compile = Callable[[Compiler, KernelSource], Cubin | Unsupported]
_COMPILE: Compile = Compiler._cubin
_NVRTC_COMPILE = nvrtc._compiled


def share_cubins() -> None:
    """Let every :class:`Compiler` of this process read the archive and the store."""
    if Compiler._cubin is not _COMPILE:
        return

    def shared(compiler: Compiler, source: KernelSource) -> Cubin | Unsupported:
        if nvrtc._compiled is not _NVRTC_COMPILE:
            return _COMPILE(compiler, source)  # a test's stand-in: its results are not machine code
        file = compiler._file(source)
        name = Path(file).name
        archived = _archived() / name
        if archived.exists():
            return _decode(file, archived.read_bytes())

        def make(entry: Path) -> None:
            (entry / name).write_bytes(_encode(_COMPILE(compiler, source)))
            (entry / _VERSION).write_text(json.dumps(compiler._nvrtc_version))

        key = digest(name, _package_version())
        return _decode(file, (content_store().made(KIND, key, make) / name).read_bytes())

    Compiler._cubin = shared  # type: ignore[method-assign]
    version = _archived() / _VERSION
    if version.exists() and not _has_nvrtc():
        archived_version = tuple(json.loads(version.read_text()))
        Compiler._nvrtc_version = property(lambda _: archived_version)  # type: ignore[assignment]


@contextmanager
def compiled_again() -> Iterator[None]:
    """Compile every source again, for tests of the compiler itself."""
    before, Compiler._cubin = Compiler._cubin, _COMPILE  # type: ignore[method-assign]
    try:
        yield
    finally:
        Compiler._cubin = before  # type: ignore[method-assign]


@cache
def _package_version() -> str:
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""  # part of a CUDA toolkit


@cache
def _archived() -> Path:
    """Return the folder of the unpacked archive; without an archive it does not exist."""
    archive = Path(os.environ.get(ARCHIVE) or DEFAULT_ARCHIVE)
    if not archive.exists():
        return shared_folder() / "no-archive"

    def unpack(folder: Path) -> None:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")

    return made_once("gpu-cubins", unpack)


def _has_nvrtc() -> bool:
    try:
        return bool(Compiler("sm_90a").version)
    except SpecbuildError:
        return False


def _encode(compiled: Cubin | Unsupported) -> bytes:
    """Return one line of JSON, followed by the machine code."""
    if isinstance(compiled, Unsupported):
        return json.dumps({"reason": compiled.reason}).encode() + b"\n"
    entries = {name: asdict(resources) for name, resources in compiled.entries.items()}
    return json.dumps({"entries": entries}).encode() + b"\n" + compiled.data


def _decode(file: str, stored: bytes) -> Cubin | Unsupported:
    header, _, data = stored.partition(b"\n")
    described = json.loads(header)
    if "reason" in described:
        return Unsupported(described["reason"])
    entries = {name: Resources(**fields) for name, fields in described["entries"].items()}
    return Cubin(file, data, entries)


def pack(store: Path, archive: Path) -> int:
    """Write the kernels of a store, sorted by source, to an archive; return their number."""
    files = {file.name: file.read_bytes() for file in store.glob(f"{KIND}/*/*{SUFFIX}")}
    # Variants of a source are similar: adjacent in the archive, they compress ten times better.
    ordered = sorted(files.items(), key=lambda item: (item[1].partition(b"\n")[0][:60], item[0]))
    versions = store.glob(f"{KIND}/*/{_VERSION}")
    version = max(versions, key=lambda file: file.stat().st_mtime).read_bytes()
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for name, data in [(_VERSION, version), *ordered]:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return len(files)


if __name__ == "__main__":
    _, command, store, archive = sys.argv
    assert command == "pack", __doc__
    count = pack(Path(store), Path(archive))
    print(f"{count} kernels, {Path(archive).stat().st_size / 1e6:.1f} MB: {archive}")
