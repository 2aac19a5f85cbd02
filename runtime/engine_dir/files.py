"""The files of an engine directory: every byte is checked before it is used."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from specbuild.runtime.engine_dir.features import require_known
from specbuild.runtime.engine_dir.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    MANIFEST_HASH_FILE,
    SIGNATURE_FILE,
    STAGED_SIGNATURE_FILE,
    Manifest,
    StoredFile,
)
from specbuild.runtime.engine_dir.manifest_check import check_manifest
from specbuild.runtime.engine_dir.origin import Origin
from specbuild.runtime.engine_dir.rebuild import build_command, check_version
from specbuild.runtime.engine_dir.regular_file import open_regular, read_regular
from specbuild.runtime.engine_dir.strict_json import brief, from_json, parsed
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, SpecbuildError

MAX_MANIFEST_BYTES = 16 << 20
# The last one can remain after an interrupted ``sign``. It is never read, and the next one replaces
# it.
_METADATA_FILES = frozenset(
    {MANIFEST_FILE, MANIFEST_HASH_FILE, SIGNATURE_FILE, STAGED_SIGNATURE_FILE}
)


def read_manifest(directory: Path, origin: Origin | None = None) -> Manifest:
    """Return the manifest, parsed after a check of its SHA-256. No other file is read.

    Raises EngineFileError if the directory is no engine, is damaged, has another format, or is not
    of this ``origin``.
    """
    data = manifest_bytes(directory)
    if origin is not None:
        origin.require(directory, manifest_digest(data))
    where = directory / MANIFEST_FILE
    try:
        decoded = parsed(data)
    except ValueError as error:
        raise OutdatedEngineError(f"{where} is not JSON ({error})") from error
    check_version(directory, where, decoded)
    features = decoded.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise EngineFileError(f"{where}: features are {brief(features)}, expected a list of names")
    try:
        require_known(Manifest, features)
    except SpecbuildError as error:
        raise EngineFileError(f"{directory}: {error}") from error
    try:
        manifest = from_json(Manifest, decoded, MANIFEST_FILE)
        check_manifest(manifest)
    except (SpecbuildError, ValueError) as error:
        command = build_command(directory, decoded)
        raise OutdatedEngineError.of(directory, error, command) from error
    return manifest


def require_only_engine(directory: Path) -> None:
    """Raise EngineFileError if a directory has other files than an engine of any version.

    Contents are not checked, and files may be missing.
    """
    try:
        decoded = parsed(manifest_bytes(directory))
        version, files = decoded["format_version"], decoded["files"]
    except (ValueError, LookupError, TypeError) as error:
        raise EngineFileError(f"{directory / MANIFEST_FILE} is no engine's") from error
    if type(version) is not int or not isinstance(files, dict):
        raise EngineFileError(f"{directory / MANIFEST_FILE} is no engine's")
    for _ in _present(directory, "", *_listed(files)):
        pass


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Check that all listed files exist with their sizes, and no others. Reads no contents.

    Raises EngineFileError with the file's name.
    """
    actual = dict(_present(directory, "", *_listed(manifest.files)))
    for name, entry in manifest.files.items():
        if name not in actual:
            raise EngineFileError(
                f"{directory}: {name} is missing; copy the engine again or rebuild it"
            )
        _require_size(directory, name, actual[name], entry.bytes)


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check sizes and checksums of all files; EngineFileError names the first that differs.

    Of a chunked file, one chunk is in memory at a time.
    """
    check_sizes(directory, manifest)
    for name, entry in manifest.files.items():
        data = mapped_file(directory, manifest, name)
        for i, digest in enumerate(_digests(_passing(data, entry.chunk_bytes))):
            check_chunk(directory, manifest, name, i, digest)


def read_file(directory: Path, manifest: Manifest, name: str) -> memoryview:
    """Return the checked bytes of a file of the engine, memory-mapped and read-only.

    A chunked file is checked chunk by chunk while it is read.
    """
    data = mapped_file(directory, manifest, name)
    for i, digest in enumerate(_digests(_pieces(data, manifest.files[name].chunk_bytes))):
        check_chunk(directory, manifest, name, i, digest)
    return data


def mapped_file(directory: Path, manifest: Manifest, name: str) -> memoryview:
    """Return the bytes of a file, of the size in the manifest, without a check of digests.

    Raises EngineFileError if the file is not listed, is missing, or has another size.
    """
    entry = manifest.files.get(name)
    if entry is None:
        raise OutdatedEngineError(f"{directory}: {name} is no file that the manifest lists")
    return _mapped(directory, name, entry.bytes)


def check_chunk(directory: Path, manifest: Manifest, name: str, chunk: int, digest: str) -> None:
    """Raise EngineFileError if a chunk's XXH3-128 differs from the manifest's.

    A file that is not chunked is one chunk.
    """
    entry = manifest.files[name]
    expected = entry.xxh3_128 if entry.chunk_bytes is None else entry.chunks[chunk]
    if digest != expected:
        place = "" if entry.chunk_bytes is None else f" in chunk {chunk}"
        raise EngineFileError(
            f"{directory}: {name} is damaged (wrong checksum{place}); "
            "copy the engine again or rebuild it"
        )


def file_entry(path: Path, *, chunked: bool) -> StoredFile:
    """Return a file's size and checksums for the manifest, with one chunk in memory at a time."""
    from xxhash import xxh3_128, xxh3_128_hexdigest

    data = _mapped(path.parent, path.name, None)
    file_digest, chunks = xxh3_128(), []
    for piece in _passing(data, CHUNK_BYTES):
        file_digest.update(piece)
        chunks.append(xxh3_128_hexdigest(piece))
    return StoredFile(
        bytes=len(data),
        xxh3_128=file_digest.hexdigest(),
        chunk_bytes=CHUNK_BYTES if chunked else None,
        chunks=tuple(chunks) if chunked else (),
    )


def manifest_digest(data: bytes) -> str:
    """Return the text of ``manifest.sha256``: hexadecimal, as ``sha256sum`` prints it."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST_FILE}\n"


def manifest_digest_of(directory: Path) -> str:
    """Return the text of a directory's ``manifest.sha256``; raises as :func:`manifest_bytes`."""
    return manifest_digest(manifest_bytes(directory))


def manifest_bytes(directory: Path) -> bytes:
    """Return the bytes of ``manifest.json``, after a comparison with ``manifest.sha256``.

    Raises EngineFileError if the directory is no engine, or the two differ.
    """
    if not directory.is_dir():
        actual = "a file, not a directory" if directory.exists() else "no such directory"
        raise EngineFileError(
            f"{directory} is not an engine: {actual}; give the path that build wrote"
        )
    parts = []
    for name in (MANIFEST_FILE, MANIFEST_HASH_FILE):
        try:
            parts.append(read_regular(directory, name, most_bytes=MAX_MANIFEST_BYTES))
        except OSError as error:
            raise EngineFileError(
                f"{directory} is not an engine: {name} cannot be read "
                f"({error.strerror}); give the path that build wrote"
            ) from error
    data, digest = parts
    if digest != manifest_digest(data).encode():
        raise EngineFileError(
            f"{directory}: {MANIFEST_FILE} is damaged (it does not agree with "
            f"{MANIFEST_HASH_FILE}); copy the engine again or rebuild it"
        )
    return data


def _listed(files: Collection[str]) -> tuple[set[str], set[str]]:
    """Return all files that an engine may have, and their folders."""
    listed = {*files, *_METADATA_FILES}
    return listed, {str(folder) for name in listed for folder in PurePosixPath(name).parents}


def _present(
    directory: Path, folder: str, listed: Collection[str], folders: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Return the files in a folder and their sizes; EngineFileError for the first unlisted one."""
    try:
        with os.scandir(directory / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if name not in (folders if is_folder else listed):
                    raise EngineFileError(
                        f"{directory}: {name} is no part of this engine; remove it"
                    )
                if is_folder:
                    yield from _present(directory, name, listed, folders)
                elif entry.is_file(follow_symlinks=False):
                    yield name, entry.stat(follow_symlinks=False).st_size
                else:
                    raise EngineFileError(
                        f"{directory}: {name} is no regular file, as all of an engine are; copy "
                        "the engine with its links followed (cp -rL)"
                    )
    except OSError as error:
        raise EngineFileError(f"{directory}: {folder} cannot be read ({error.strerror})") from error


def _mapped(directory: Path, name: str, size: int | None) -> memoryview:
    """Return the bytes of a file, memory-mapped and read-only; check ``size`` if given."""
    try:
        with os.fdopen(open_regular(directory, name), "rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if size is not None:
                _require_size(directory, name, actual, size)
            # An empty file cannot be mapped.
            if actual == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), actual, access=mmap.ACCESS_READ))
    except OSError as error:
        raise EngineFileError(
            f"{directory}: {name} cannot be read ({error.strerror}); "
            "copy the engine again or rebuild it"
        ) from error


def _require_size(directory: Path, name: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise EngineFileError(
            f"{directory}: {name} has {actual} bytes, the manifest says {expected}; "
            "copy the engine again or rebuild it"
        )


def _pieces(data: memoryview, nbytes: int | None) -> Iterator[memoryview]:
    """Yield the data in pieces of ``nbytes``; one empty piece if the data is empty."""
    step = nbytes or max(len(data), 1)
    for start in range(0, max(len(data), 1), step):
        yield data[start : start + step]


def _passing(data: memoryview, nbytes: int | None) -> Iterator[memoryview]:
    """Yield the pieces of a mapped file, and release the memory pages of each afterwards.

    Otherwise the complete file would count as memory of the process.
    """
    start = 0
    for piece in _pieces(data, nbytes):
        yield piece
        if isinstance(data.obj, mmap.mmap):
            page = start - start % mmap.PAGESIZE
            data.obj.madvise(mmap.MADV_DONTNEED, page, start + len(piece) - page)
        start += len(piece)


def _digests(pieces: Iterable[memoryview]) -> Iterator[str]:
    from xxhash import xxh3_128_hexdigest

    return map(xxh3_128_hexdigest, pieces)
