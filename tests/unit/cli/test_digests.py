"""Digests of the contents of checkpoints, cached while a file is unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specbuild.cli.model import digests
from specbuild.cli.model.digests import FileDigests, checkpoint_files

LONG_AGO_NS = 10**18


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint directory that was written long ago."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "README.md"):
        (folder / name).write_text(name)
        os.utime(folder / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return folder


class Recorded:
    """Progress that records its calls."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, str]] = []
        self.done = 0

    def start(self, stage: str, total: int, unit: str) -> None:
        self.stages.append((stage, total, unit))

    def advance(self, amount: int) -> None:
        self.done += amount

    def note(self, message: str) -> None:
        raise AssertionError(message)


def test_the_digest_covers_the_files_that_a_build_reads(model: Path, tmp_path: Path) -> None:
    index = tmp_path / "digests.json"
    before = FileDigests(index).of_checkpoint(model)
    (model / "README.md").write_text("other")
    assert FileDigests(index).of_checkpoint(model) == before
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        contents = (model / name).read_bytes()
        (model / name).write_text("other")
        assert FileDigests(index).of_checkpoint(model) != before, name
        (model / name).write_bytes(contents)
    assert FileDigests(index).of_checkpoint(model) == before, "the same contents again"
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    assert FileDigests(index).of_checkpoint(model) != before, "another name"


def test_a_file_is_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SHOWN_BYTES", 1)
    index, first, second = tmp_path / "digests.json", Recorded(), Recorded()
    digest = FileDigests(index, first).of_checkpoint(model)
    size = sum(file.stat().st_size for file in checkpoint_files(model))
    assert first.stages == [("reading model for its digest", size, "B")]
    assert first.done == size
    assert FileDigests(index, second).of_checkpoint(model) == digest
    assert (second.stages, second.done) == ([], 0)
    # A file of the same size and time is considered unchanged, as in make.
    stat = (model / "config.json").stat()
    (model / "config.json").write_text("x" * stat.st_size)
    os.utime(model / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileDigests(index).of_checkpoint(model) == digest
    os.utime(model / "config.json", ns=(LONG_AGO_NS + 1, LONG_AGO_NS + 1))
    assert FileDigests(index).of_checkpoint(model) != digest


def test_the_digest_of_a_new_file_is_not_cached(model: Path, tmp_path: Path) -> None:
    index = tmp_path / "digests.json"
    (model / "config.json").write_text("new")
    FileDigests(index).of_checkpoint(model)
    assert str(model / "config.json") not in json.loads(index.read_text())
    assert str(model / "model.safetensors") in json.loads(index.read_text())


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\x00"])
def test_a_damaged_index_is_recreated(model: Path, tmp_path: Path, text: str) -> None:
    index = tmp_path / "digests.json"
    digest = FileDigests(index).of_checkpoint(model)
    index.write_text(text)
    assert FileDigests(index).of_checkpoint(model) == digest
    assert len(json.loads(index.read_text())) == 3


def test_the_digest_covers_all_files_of_a_split_gguf_model(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other-00001-of-00002.gguf"):
        (tmp_path / name).write_text(name)
    first = tmp_path / "m-00001-of-00002.gguf"
    assert checkpoint_files(first) == [first, tmp_path / "m-00002-of-00002.gguf"]
    alone = tmp_path / "alone.gguf"
    alone.write_text("x")
    assert checkpoint_files(alone) == [alone]
