"""Every byte of an engine directory is checked: damage is detected and named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_directory import manifest_of, write_engine, write_manifest, write_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir import files as engine_file
from specbuild.runtime.engine_dir import manifest
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.engine_dir.strict_json import to_json
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.request import GenerateParams, Prompt

FILES = (
    "manifest.json",
    "manifest.sha256",
    "weights.safetensors",
    "graphs/target.onnx",
    "graphs/choose.onnx",
)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    write_engine(path)
    return path


def load(path: Path) -> None:
    engine = Engine.load(path)
    list(engine.generate([Prompt("a", prompt_ids=(1, 2))], GenerateParams(max_new_tokens=2)))


def test_a_sound_engine_loads_and_its_weights_are_the_files(tmp_path: Path) -> None:
    weights = write_engine(tmp_path / "engine")
    described = read_manifest(tmp_path / "engine")
    verify_files(tmp_path / "engine", described)
    opened = open_weights(tmp_path / "engine", described)
    assert opened.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(opened[name], array)
        with pytest.raises(ValueError, match="read-only"):
            opened[name][:] = 0
    load(tmp_path / "engine")


def test_a_moved_engine_is_the_same(tmp_path: Path, engine: Path) -> None:
    engine.rename(tmp_path / "elsewhere")
    load(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
def test_rejects_a_flipped_bit(engine: Path, name: str, place: float) -> None:
    data = bytearray((engine / name).read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    (engine / name).write_bytes(data)
    with pytest.raises(EngineFileError) as caught:
        load(engine)
    assert Path(name).name in str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_rejects_a_truncated_file(engine: Path, name: str, keep: float) -> None:
    data = (engine / name).read_bytes()
    (engine / name).write_bytes(data[: int(keep * len(data))])
    with pytest.raises(EngineFileError) as caught:
        load(engine)
    assert Path(name).name in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_rejects_a_missing_file(engine: Path, name: str) -> None:
    (engine / name).unlink()
    with pytest.raises(EngineFileError) as caught:
        load(engine)
    assert Path(name).name in str(caught.value)


@pytest.mark.parametrize("place", [".", "nowhere"])
def test_rejects_an_extra_link(engine: Path, place: str) -> None:
    (engine / "extra").symlink_to(place)
    with pytest.raises(EngineFileError, match=r"extra is no part of this engine"):
        load(engine)


@pytest.mark.parametrize("name", ["extra.bin", "graphs/extra.onnx"])
def test_rejects_an_extra_file(engine: Path, name: str) -> None:
    (engine / name).write_bytes(b"x")
    with pytest.raises(EngineFileError, match=r"extra.* is no part of this engine"):
        load(engine)


def test_detects_a_damaged_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_file, "CHUNK_BYTES", 256)
    write_engine(tmp_path / "engine")
    described = read_manifest(tmp_path / "engine")
    assert len(described.files["weights.safetensors"].chunks) > 3
    path = tmp_path / "engine/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[2 * 256 + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(EngineFileError, match="chunk 2"):
        open_weights(tmp_path / "engine", described)


@pytest.mark.parametrize("path", ["nowhere", "a_file"])
def test_rejects_a_path_that_is_not_a_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "a_file").write_text("x")
    with pytest.raises(EngineFileError, match="not an engine"):
        read_manifest(tmp_path / path)


def test_the_error_names_another_format_version(engine: Path) -> None:
    data = json.loads((engine / "manifest.json").read_bytes())
    write_manifest(engine, json.dumps({**data, "format_version": 99}).encode())
    with pytest.raises(EngineFileError, match=r"format version 99, of a newer .* reads 3: update"):
        read_manifest(engine)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"format_version": %d}' % FORMAT_VERSION,
        b"[" * 100_000,
        b'{"format_version": NaN}',
        b'{"format_version": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_manifest_that_is_none(engine: Path, data: bytes) -> None:
    write_manifest(engine, data)
    with pytest.raises(EngineFileError):
        read_manifest(engine)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_changed_field_is_rejected_or_harmless(engine: Path, data: st.DataObject) -> None:
    """A manifest with one replaced value loads, or is refused in one sentence."""
    fresh = to_json(manifest_of_engine(engine))
    holder, key = fresh, data.draw(st.sampled_from(sorted(fresh)))
    while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.booleans()):
        holder = holder[key]
        keys = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
    holder[key] = data.draw(values)
    write_manifest(engine, json.dumps(fresh).encode())
    try:
        described = read_manifest(engine)
        verify_files(engine, described)
        open_weights(engine, described)
    except EngineFileError as error:
        assert "\n" not in str(error).strip()


def manifest_of_engine(path: Path) -> manifest.Manifest:
    for name in ("manifest.json", "manifest.sha256"):
        (path / name).unlink(missing_ok=True)
    weights = {
        "embedding": np.zeros((29, 4), np.float32),
        "head": np.zeros((4, 29), np.float32),
        "unused.scale": np.zeros(3, np.float32),
    }
    return manifest_of(path, weights)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_rejects_a_file_outside_the_engine(engine: Path, name: str) -> None:
    described = manifest_of_engine(engine)
    files = {**described.files, name: described.files["graphs/choose.onnx"]}
    write_manifest(engine, dataclasses.replace(described, files=files))
    with pytest.raises(EngineFileError, match="does not lie inside"):
        read_manifest(engine)


def header_bytes(header: object, data: bytes) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    head += b" " * (-(len(head) + 8) % 64)
    return len(head).to_bytes(8, "little") + head + data


def entry(first: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape or [2], "data_offsets": [first, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header ends outside"),
        (b"\x00" * 4, "header ends outside"),
        ((2**62).to_bytes(8, "little"), "header ends outside"),
        (header_bytes(b"\xff\xff", b""), "not JSON"),
        (header_bytes(b"[1]", b""), "no object"),
        (header_bytes(b"[" * 50_000, b""), "not JSON"),
        (header_bytes({"a": entry(0, 8)}, b"\0" * 8), r"missing \['b'\]"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 16), "c": 1}, b"\0" * 16), r"\['c'\]"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 16)}, b"\0" * 12), "b ends outside"),
        (header_bytes({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), "b overlaps"),
        (header_bytes({"a": entry(0, 8), "b": entry(12, 20)}, b"\0" * 20), "b leaves a gap"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 16)}, b"\0" * 20), "belong to no tensor"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 20)}, b"\0" * 20), "b has another size"),
        (header_bytes({"a": entry(0, 8), "b": entry(-8, 0)}, b"\0" * 8), "b has another size"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 16, [3])}, b"\0" * 16), "b is F32"),
        (header_bytes({"a": entry(0, 8), "b": entry(8, 16, dtype="X")}, b"\0" * 16), "b is X"),
        (header_bytes({"a": entry(0, 8), "b": 7}, b"\0" * 8), "b is malformed"),
        (
            header_bytes({"a": entry(0, 8), "b": {**entry(8, 16), "data_offsets": "x"}}, b"\0" * 8),
            "offsets",
        ),
    ],
)
def test_rejects_a_malformed_container(tmp_path: Path, content: bytes, message: str) -> None:
    two = {n: np.ones(2, np.float32) for n in ("a", "b")}
    path = tmp_path / "engine"
    write_engine(path)
    write_weights(path / "weights.safetensors", two)
    described = manifest_of_engine(path)
    tensors = {n: manifest.StoredTensor("F32", (2,), (n,)) for n in two}
    (path / "weights.safetensors").write_bytes(content)
    entry_now = engine_file.file_entry(path / "weights.safetensors", chunked=True)
    files = {**described.files, "weights.safetensors": entry_now}
    with pytest.raises(EngineFileError, match=message):
        open_weights(path, dataclasses.replace(described, tensors=tensors, files=files))


@pytest.mark.parametrize(("field", "value"), [("target", {"\n": None}), ("files", {"\n": None})])
def test_a_key_with_a_line_break_is_shown_on_one_line(
    engine: Path, field: str, value: dict[str, None]
) -> None:
    described = to_json(manifest_of_engine(engine)) | {field: value}
    write_manifest(engine, json.dumps(described).encode())
    with pytest.raises(EngineFileError) as refused:
        read_manifest(engine)
    assert "\n" not in str(refused.value)
    assert "'\\n'" in str(refused.value)


WATCHED = """
import re, sys
from pathlib import Path
from specbuild.runtime.engine_dir.files import file_entry, read_manifest, verify_files

def peak_bytes():
    held = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", held)[1]) << 10

engine = Path(sys.argv[1])
described = read_manifest(engine)
held = peak_bytes()
verify_files(engine, described)
name = "weights.safetensors"
assert file_entry(engine / name, chunked=True) == described.files[name]
print(peak_bytes() - held)
"""


def test_a_large_file_is_checked_in_little_memory(engine: Path) -> None:
    """The peak memory of a check of 192 MiB of weights is a few chunks."""
    weights = {
        "embedding": np.zeros((29, 4), np.float32),
        "head": np.zeros((4, 29), np.float32),
        "large": np.random.default_rng(1).random((192, 1 << 18), np.float32),
    }
    for name in ("manifest.json", "manifest.sha256"):
        (engine / name).unlink()
    write_weights(engine / "weights.safetensors", weights)
    write_manifest(engine, manifest_of(engine, weights))
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, engine], capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
    assert int(ran.stdout) < 64 << 20
