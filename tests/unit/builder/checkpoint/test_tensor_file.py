"""Files of tensors: they can be read back, with the permissions of new files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specbuild.builder.checkpoint.tensor_file import write_tensors
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(params=[0o022, 0o077], ids=["open", "private"])
def rights(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set a umask; return the expected permissions of a new file."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_the_file_is_read_back_with_permissions_of_new_files(tmp_path: Path, rights: int) -> None:
    tensors = {"a.weight": torch.randn(3, 5).bfloat16(), "ids": torch.arange(7)}
    file = tmp_path / "model.safetensors"
    write_tensors(file, tensors)
    assert stat.S_IMODE(file.stat().st_mode) == rights
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {name: opened.get_tensor(name).tolist() for name in opened.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in tensors.items()
        }
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_failed_write_leaves_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": torch.zeros(2)})
    before = file.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecbuildError, match=r"model.safetensors cannot be written \(No space"):
        write_tensors(file, {"a": torch.ones(2)})
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
