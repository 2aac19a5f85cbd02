"""Every reader rejects JSON that nests deeper than the interpreter supports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specbuild.builder.checkpoint.source import read_config, read_header, read_json
from specbuild.builder.training.documents import DocumentReader
from specbuild.cli.bench.against import read_report
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.plugin_record import FIELD_NAMES, read_fields

DEEP = b"[" * 100_000


def header(file: Path) -> object:
    file.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    return read_header(file)


def document(file: Path) -> object:
    reader = DocumentReader(file.parent, vocab=29, end_of_text=())
    return reader.read((file.rename(file.with_suffix(".jsonl")),))


@pytest.mark.parametrize(
    "read",
    [
        read_json,
        read_report,
        header,
        document,
        lambda file: read_config(file.parent),
        lambda _: read_fields(dict.fromkeys(FIELD_NAMES, DEEP)),
    ],
)
def test_rejects_deeply_nested_json(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(DEEP)
    with pytest.raises(SpecbuildError, match="recursion"):
        read(file)
