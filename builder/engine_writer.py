"""Writes an engine directory: streamed weights, hashed files, one rename at the end."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbuild.builder.durable import fsync, write_bytes
from specbuild.builder.passes.weights import Recipe
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_file import file_entry, manifest_digest, read_manifest, verify_files
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.manifest import (
    MANIFEST_FILE,
    MANIFEST_HASH_FILE,
    WEIGHTS_FILE,
    Manifest,
    StoredFile,
)
from specbuild.runtime.strict_json import to_json

_SAFETENSORS_DTYPES = {"torch.float32": "F32", "torch.int32": "I32"}
# Room for graphs, tokenizer and manifest beside the weights, which are known exactly.
_OTHER_BYTES = 64 << 20


@contextmanager
def staged_directory(output: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``output`` that takes its place when the block ends well.

    Whatever goes wrong, ``output`` is what it was before. Raises SpecbuildError where it exists
    and ``force`` is not given.
    """
    if output.exists() and not force:
        raise SpecbuildError(f"{output} exists; remove it or pass --force")
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-", dir=output.parent))
    try:
        yield staging
        staging.chmod(0o755)
        _swap(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def json_bytes(data: Any) -> bytes:
    """JSON that is the same for the same data."""
    return (json.dumps(to_json(data), indent=1, ensure_ascii=False) + "\n").encode()


def weight_bytes(weights: Mapping[str, Recipe]) -> int:
    """What the weights will take on disk, before anything is made."""
    return sum(_size(recipe) for recipe in weights.values())


def require_space(folder: Path, weights: int) -> None:
    """SpecbuildError with the numbers where the disk cannot hold the engine."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < weights + _OTHER_BYTES:
        raise SpecbuildError(
            f"{folder}: {free / 1e9:.2f} GB free, the engine needs {weights / 1e9:.2f} GB; "
            "free some space or choose another --output"
        )


def write_weights(path: Path, weights: Mapping[str, Recipe], progress: Progress) -> None:
    """Writes ``weights`` as safetensors, one tensor in memory at a time."""
    header: dict[str, Any] = {}
    offset = 0
    for name, recipe in weights.items():
        size = _size(recipe)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[str(recipe.dtype)],
            "shape": list(recipe.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    # Data that starts at a multiple of 64 bytes can be mapped and used where it lies.
    head += b" " * (-(len(head) + 8) % 64)
    progress.start("writing weights", offset, "B")
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for recipe in weights.values():
            file.write(recipe.checked().contiguous().numpy().tobytes())
            progress.advance(_size(recipe))
    fsync(path)


def stored_files(folder: Path) -> dict[str, StoredFile]:
    """Size and checksums of every file written so far, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): file_entry(path, chunked=path.name == WEIGHTS_FILE)
        for path in files
    }


def seal(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest and its hash, then reads the whole directory back and checks it."""
    data = json_bytes(manifest)
    write_bytes(folder / MANIFEST_FILE, data)
    write_bytes(folder / MANIFEST_HASH_FILE, manifest_digest(data).encode())
    verify_files(folder, read_manifest(folder))


def _size(recipe: Recipe) -> int:
    count = recipe.dtype.itemsize
    for size in recipe.shape:
        count *= size
    return count


def _swap(staging: Path, output: Path) -> None:
    """Renames ``staging`` to ``output``; an old one moves aside first and is removed last."""
    fsync(staging)
    if output.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
        output.rename(retired / "engine")
        staging.rename(output)
        shutil.rmtree(retired)
    else:
        staging.rename(output)
    fsync(output.parent)
