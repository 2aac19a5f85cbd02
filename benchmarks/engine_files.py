"""The files of an engine directory as ``compare_engines.py`` compares them."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST, REPORT, PLAN = "manifest.json", "build_report.json", "plan.json"
TOLD, UNREAD = (MANIFEST, REPORT), "manifest.sha256"
RECORD_HEAD = 64  # bytes before a record, as before a TensorRT-RTX engine


class EngineFiles:
    """Return the files of an engine directory by kind; machine code by its digest."""

    def __init__(self, folder: Path) -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix() for path in files}
        cubins = sorted(name for name in names if name.endswith(".cubin"))
        self.codes = {name: _digest((folder / name).read_bytes()) for name in cubins}
        self.plan: dict[str, Any] = {"kernels": [], "programs": []}
        if PLAN in names:
            self.plan = json.loads((folder / PLAN).read_bytes())
            _name_code(self.plan["kernels"], self.codes)
        self.programs = [folder / entry["file"] for entry in self.plan["programs"]]
        listed = {entry["file"] for entry in self.plan["programs"]}
        # Files that are compared byte for byte.
        self.others = names - set(cubins) - listed - {PLAN, UNREAD, *TOLD}


def _name_code(kernels: Iterable[dict[str, Any]], codes: dict[str, str]) -> None:
    """Replace the cubin file of each kernel by the digest of its machine code."""
    for kernel in kernels:
        if kernel["cubin"] not in codes:
            raise ValueError(f"kernel {kernel['name']} is in {kernel['cubin']}, which is missing")
        kernel["cubin"] = codes[kernel["cubin"]]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _opened(value: Any) -> Any:
    """Return a document with parsed plugin fields: their description, and cubins by content."""
    if isinstance(value, list):
        return [_opened(item) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {key: _opened(item) for key, item in value.items()}
    if not {"description", "cubins"} <= value.keys():
        return rest
    record, packed = json.loads(rest.pop("description")), json.loads(rest.pop("cubins"))
    codes = {n: _digest(zlib.decompress(base64.b85decode(text))) for n, text in packed.items()}
    _name_code(record["kernels"], codes)
    return rest | {"record": record, "codes": sorted(set(codes.values()))}


def read_document(path: Path) -> tuple[str, Any] | None:
    """Return the kind and content of a file that is no plan but may differ in names."""
    if path.name.endswith(".launches.json"):
        return "launches", _opened(json.loads(path.read_bytes()))
    if path.suffix == ".engine":
        record = path.read_bytes()[RECORD_HEAD:]
        if record.startswith(b"{"):
            return "engine", _opened(json.loads(record))
    return None


def read_json(path: Path) -> Any:
    """Return a JSON file, or None if it does not exist."""
    return json.loads(path.read_bytes()) if path.is_file() else None
