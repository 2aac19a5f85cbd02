"""Writes an engine directory: streamed weights, hashed files, and one rename at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from specbuild.builder.durable import free_space, fsync, put_in_place, staging_folder, write_bytes
from specbuild.builder.engine.shared_weights import stored_names, stored_once
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import (
    file_entry,
    manifest_digest,
    read_manifest,
    require_only_engine,
    verify_files,
)
from specbuild.runtime.engine_dir.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    MANIFEST_HASH_FILE,
    WEIGHTS_FILE,
    Manifest,
    StoredFile,
)
from specbuild.runtime.engine_dir.ranks import rank_weights_file
from specbuild.runtime.engine_dir.strict_json import to_json
from specbuild.runtime.errors import EngineFileError, SpecbuildError

SAFETENSORS_DTYPES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.int8": "I8",
    "torch.int32": "I32",
    "torch.bfloat16": "BF16",
    "torch.uint8": "U8",
}
# The space of graphs, tokenizer and manifest, in addition to the exact size of the weights.
_OTHER_BYTES = 64 << 20


class EngineFolder:
    """A folder that becomes an engine; it records the checksums of all bytes written through it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, str] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write one file."""
        write_bytes(self.path / name, data)
        self._written[name] = xxhash.xxh3_128_hexdigest(data)

    def write_weights(self, weights: Mapping[str, Recipe], progress: Progress) -> None:
        """Write ``weights`` as safetensors, one tensor in memory at a time, equal ones once.

        Sharded ones go to a file for each rank.
        """
        progress.start("writing weights", weight_bytes(weights), "B")
        weights = stored_once(weights)
        unsharded = {name: recipe for name, recipe in weights.items() if recipe.ranks == 1}
        self._write_tensors((WEIGHTS_FILE,), unsharded, progress)
        sharded = {name: recipe for name, recipe in weights.items() if recipe.ranks > 1}
        if sharded:
            ranks = range(next(iter(sharded.values())).ranks)
            self._write_tensors(tuple(map(rank_weights_file, ranks)), sharded, progress)

    def _write_tensors(
        self, names: Sequence[str], weights: Mapping[str, Recipe], progress: Progress
    ) -> None:
        """Write the same tensors to each file: part i of a sharded one to file i."""
        head, _ = _weights_header(weights)
        digests = [xxhash.xxh3_128(head) for _ in names]
        with ExitStack() as stack:
            files = [stack.enter_context((self.path / name).open("wb")) for name in names]
            for file in files:
                file.write(head)
            for recipe in weights.values():
                parts = recipe.checked().contiguous().flatten().view(torch.uint8).numpy()
                for file, digest, part in zip(
                    files, digests, parts.reshape(len(files), -1), strict=True
                ):
                    file.write(part.data)
                    digest.update(part.data)
                progress.advance(recipe.nbytes * len(files))
        for name, digest in zip(names, digests, strict=True):
            fsync(self.path / name)
            self._written[name] = digest.hexdigest()

    def adopt(self, name: str) -> None:
        """Register a file that another process wrote into the folder."""
        path = self.path / name
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
        fsync(path)
        self._written[name] = digest.hexdigest()

    def stored_files(self) -> dict[str, StoredFile]:
        """Return size and checksums of every file, read back from the disk.

        Raises SpecbuildError if the disk has other bytes than were written.
        """
        entries = {}
        for name, digest in sorted(self._written.items()):
            entries[name] = file_entry(self.path / name, chunked=_chunked(name))
            if entries[name].xxh3_128 != digest:
                raise SpecbuildError(
                    f"{name} reads back other than it was written; the disk is full or faulty"
                )
        return entries

    def seal(self, manifest: Manifest) -> None:
        """Write the manifest and its hash, then check the directory as a reader does."""
        data = json_bytes(stored_json(manifest))
        write_bytes(self.path / MANIFEST_FILE, data)
        write_bytes(self.path / MANIFEST_HASH_FILE, manifest_digest(data).encode())
        verify_files(self.path, read_manifest(self.path))


def _chunked(name: str) -> bool:
    """Return whether a file is large, and checked in chunks while it is read."""
    return name.endswith((".safetensors", ".engine"))


@contextmanager
def staged_engine(output: Path, *, force: bool) -> Iterator[EngineFolder]:
    """Yield a temporary sibling of ``output`` that replaces it when the block succeeds.

    After any failure, ``output`` is unchanged. Raises SpecbuildError if it exists and ``force`` is
    not given, or is anything except an engine or an empty folder.
    """
    require_replaceable(output, force=force)
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_folder(output)
    try:
        yield EngineFolder(staging)
        staging.chmod(0o755)
        require_replaceable(output, force=force)
        put_in_place(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_replaceable(output: Path, *, force: bool) -> None:
    """Raise SpecbuildError if writing an engine at ``output`` would destroy something."""
    if not output.exists():
        return
    if not force:
        raise SpecbuildError(f"{output} exists; remove it or pass --force")
    empty = output.is_dir() and not any(output.iterdir())
    if empty:
        return
    try:
        require_only_engine(output)
    except EngineFileError as error:
        raise SpecbuildError(
            f"{output} exists and is no engine, which is all that --force replaces ({error}); "
            "choose another place"
        ) from error


def json_bytes(data: Any) -> bytes:
    """Return deterministic JSON."""
    return (json.dumps(to_json(data), indent=1, ensure_ascii=False) + "\n").encode()


def weight_bytes(weights: Mapping[str, Recipe]) -> int:
    """Return the size of the weights on disk, before anything is created."""
    return sum(recipe.nbytes * recipe.ranks for recipe in stored_once(weights).values())


def weight_places(weights: Mapping[str, Recipe]) -> dict[str, int]:
    """Return the offset of every weight in the file of :meth:`EngineFolder.write_weights`."""
    names = stored_names(weights)
    head, _ = _weights_header(stored_once(weights))
    header = json.loads(head[8:])
    return {name: len(head) + header[names[name]]["data_offsets"][0] for name in weights}


def require_space(folder: Path, weights: int, *, option: str = "--output") -> None:
    """Raise SpecbuildError with the sizes if the disk cannot hold the weights."""
    folder, free = free_space(folder)
    if free < weights + _OTHER_BYTES:
        raise SpecbuildError(
            f"{folder}: {free / 1e9:.2f} GB free, {weights / 1e9:.2f} GB of weights are to be "
            f"written; free some space or choose another {option}"
        )


def _weights_header(weights: Mapping[str, Recipe]) -> tuple[bytes, int]:
    """Return the safetensors header with its length, and the number of data bytes after it."""
    header: dict[str, Any] = {}
    offset = 0
    for name, recipe in weights.items():
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[str(recipe.dtype)],
            "shape": list(recipe.shape),
            "data_offsets": [offset, offset + recipe.nbytes],
        }
        offset += recipe.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    # Data aligned to 64 bytes can be mapped and used in place.
    head += b" " * (-(len(head) + 8) % 64)
    return len(head).to_bytes(8, "little") + head, offset
