"""An engine consists of regular files in its directory. Nothing else is opened."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_directory import write_engine, write_manifest

from specbuild.runtime.decode.host.cost_file import load_or_measure
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir import files as engine_files
from specbuild.runtime.engine_dir.files import check_sizes, read_file, read_manifest
from specbuild.runtime.engine_dir.regular_file import read_regular
from specbuild.runtime.errors import EngineFileError


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


def a_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link out": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "graphs/target.onnx"])
def test_rejects_special_files(engine: Path, name: str, kind: str) -> None:
    described = read_manifest(engine)
    (engine / name).unlink()
    STRANGE[kind](engine / name)
    with pytest.raises(EngineFileError, match=Path(name).name):
        Engine.load(engine)
    if name in described.files:
        with pytest.raises(EngineFileError, match=Path(name).name):
            read_file(engine, described, name)


def test_rejects_a_link_with_the_remedy(engine: Path, tmp_path: Path) -> None:
    (engine / "weights.safetensors").rename(tmp_path / "blob")
    (engine / "weights.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(EngineFileError, match=r"weights\.safetensors is no regular file.*cp -rL"):
        check_sizes(engine, read_manifest(engine))


def test_rejects_a_linked_folder(engine: Path, tmp_path: Path) -> None:
    described = read_manifest(engine)
    (engine / "graphs").rename(tmp_path / "graphs")
    (engine / "graphs").symlink_to(tmp_path / "graphs")
    with pytest.raises(EngineFileError, match="graphs"):
        check_sizes(engine, described)
    with pytest.raises(EngineFileError, match="symbolic link"):
        read_file(engine, described, "graphs/target.onnx")


def test_the_engine_itself_may_be_a_link(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(engine)
    Engine.load(tmp_path / "link")


def test_rejects_an_extra_folder(engine: Path) -> None:
    (engine / "a").mkdir()
    with pytest.raises(EngineFileError, match="a is no part of this engine"):
        check_sizes(engine, read_manifest(engine))


def test_a_size_is_compared_before_anything_is_read(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = read_manifest(engine)
    with (engine / "graphs/choose.onnx").open("r+b") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(engine_files.mmap, "mmap", None)
    with pytest.raises(EngineFileError, match="1099511627776 bytes, the manifest says"):
        read_file(engine, described, "graphs/choose.onnx")


def test_rejects_a_manifest_that_is_too_large(engine: Path) -> None:
    with (engine / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(EngineFileError, match="it has more than 16777216 bytes"):
        read_manifest(engine)


def test_the_error_names_a_file_that_is_not_listed(engine: Path) -> None:
    with pytest.raises(EngineFileError, match=r"kernels/a\.cubin is no file that the manifest"):
        read_file(engine, read_manifest(engine), "kernels/a.cubin")


TABLE = CostTable((1, 2), (1e-3, 2e-3), (1e-3,))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", STRANGE)
def test_costs_are_measured_again_if_the_cache_is_not_a_file(tmp_path: Path, kind: str) -> None:
    STRANGE[kind](tmp_path / "cost.json")
    table, _ = load_or_measure(tmp_path / "cost.json", lambda: TABLE)
    assert table == TABLE


def test_a_cost_cache_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    load_or_measure(path, lambda: TABLE)
    fresh = dataclasses.replace(TABLE, draft_s=(3e-3,))
    assert load_or_measure(path, lambda: fresh)[0] == TABLE
    path.write_text(json.dumps(json.loads(path.read_text())) + " " * (1 << 20))
    assert load_or_measure(path, lambda: fresh)[0] == fresh


def test_concurrent_processes_write_separate_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cost.tmp").mkdir()
    names, replace = [], Path.replace

    def noted(path: Path, target: Path) -> Path:
        names.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    for _ in range(2):
        load_or_measure(tmp_path / "cost.json", lambda: TABLE)
        (tmp_path / "cost.json").unlink()
    assert len(set(names)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["cost.tmp"]


def test_a_table_that_cannot_be_stored_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "cost.json").mkdir()
    table, where = load_or_measure(tmp_path / "cost.json", lambda: TABLE)
    assert table == TABLE
    assert "cannot be written" in where
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


def test_reading_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path, "a", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path, "a", most_bytes=4)


DEEP = b"[" * 500 + b"]" * 500


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"[" * 100_000, "nests too deep"),
        (b'{"a": ' + DEEP + b"}", "nests deeper"),
        (b"1" * 5000, "not JSON"),
        (b"1" + b"0" * 400, "beyond 64 bits"),
        (b"1e400", "beyond what 64 bits hold"),
        (b'"\\ud800"', "half a surrogate pair"),
        (b'{"\\uDC00": 1}', "half a surrogate pair"),
        (b'"\xed\xa0\x80"', "not JSON"),
    ],
)
@pytest.mark.parametrize("key", ["options", "format_version", "features"])
def test_rejects_json_that_cannot_be_written_again(
    engine: Path, key: str, value: bytes, said: str
) -> None:
    data = json.loads((engine / "manifest.json").read_bytes())
    text = json.dumps({**data, key: "@"}).encode().replace(b'"@"', value)
    write_manifest(engine, text)
    with pytest.raises(EngineFileError) as refused:
        read_manifest(engine)
    assert said in str(refused.value) or key != "options"
    assert len(str(refused.value)) < 500


def test_complete_surrogate_pairs_are_text(engine: Path) -> None:
    data = json.loads((engine / "manifest.json").read_bytes())
    write_manifest(engine, json.dumps({**data, "options": {"a": "\U0001f600\\ud800"}}).encode())
    assert read_manifest(engine).options == {"a": "\U0001f600\\ud800"}
