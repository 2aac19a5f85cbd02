"""Mutants of directories: one file changed, and where asked its digests made to agree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from xxhash import xxh3_128_hexdigest

from fuzz.byte_mutators import mutated_bytes
from fuzz.json_mutators import mutated_json
from fuzz.onnx_mutators import mutated_graph

MANIFEST = "manifest.json"
_HEADER_BYTES = 8


def linked_copy(source: Path, copy: Path) -> None:
    """The same directory by hard links: a file that differs is written anew."""
    shutil.copytree(source, copy, copy_function=os.link)


def rewrite(directory: Path, name: str, data: bytes) -> None:
    """Writes a file of a linked copy, and of it alone."""
    (directory / name).unlink(missing_ok=True)
    (directory / name).write_bytes(data)


def files_of(directory: Path, *suffixes: str) -> list[str]:
    """The files with these endings, any without; in order."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(name for name in names if name.endswith(suffixes or ("",)))


def mutate_raw(random: Random, directory: Path, names: list[str]) -> tuple[str, str]:
    """Changes one of the files, or what stands in its place; its name and what was done."""
    name = random.choice(names)
    if random.random() < 0.1:
        return name, _replace_file(random, directory, name)
    data, change = mutated_bytes(random, (directory / name).read_bytes())
    rewrite(directory, name, data)
    return name, change


def mutate_content(random: Random, directory: Path, names: list[str]) -> tuple[str, str]:
    """Changes one of the files by what its format means; its name and the place."""
    name = random.choice(names)
    data = (directory / name).read_bytes()
    changed, place = _by_format(random, name)(random, data)
    rewrite(directory, name, changed)
    return name, place


def rehash(directory: Path, name: str) -> None:
    """Makes the manifest agree with a changed file, and its own digest with the manifest."""
    if name != MANIFEST:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        data, entry = (directory / name).read_bytes(), manifest["files"][name]
        entry |= {"bytes": len(data), "xxh3_128": xxh3_128_hexdigest(data)}
        step = entry.get("chunk_bytes")
        if step:
            starts = range(0, max(len(data), 1), step)
            entry["chunks"] = [xxh3_128_hexdigest(data[i : i + step]) for i in starts]
        rewrite(directory, MANIFEST, json.dumps(manifest).encode())
    digest = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    rewrite(directory, "manifest.sha256", f"{digest}  {MANIFEST}\n".encode())


def _replace_file(random: Random, directory: Path, name: str) -> str:
    path, way = directory / name, random.choice(("gone", "folder", "fifo", "link", "another"))
    data = path.read_bytes()
    if way != "another":
        path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "link":
        path.symlink_to("/dev/zero")
    elif way == "another":
        (directory / f"{name}.bak").write_bytes(data)
    return way


def _by_format(random: Random, name: str) -> Callable[[Random, bytes], tuple[bytes, str]]:
    if name.endswith(".json"):
        return lambda r, data: mutated_json(r, data, r.choice((1, 1, 1, 2)))
    if name.endswith(".onnx") and random.random() < 0.85:
        return mutated_graph
    if name.endswith(".safetensors") and random.random() < 0.6:
        return _mutated_header
    return mutated_bytes


def _mutated_header(random: Random, data: bytes) -> tuple[bytes, str]:
    """Safetensors with another header; its length agrees, the tensors stay as they are."""
    end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    header, place = mutated_json(random, data[_HEADER_BYTES:end])
    return len(header).to_bytes(_HEADER_BYTES, "little") + header + data[end:], f"header.{place}"
