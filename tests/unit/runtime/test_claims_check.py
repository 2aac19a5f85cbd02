"""The sizes in a manifest are checked against each other before anything is allocated."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_directory import write_engine, write_manifest
from toy_model import toy_manifest

from specbuild.runtime.device import table_bytes, this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import TENSOR_BYTES, SpecPv, StoredFile, StoredTensor
from specbuild.runtime.engine_dir.weights_file import DTYPES
from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.cpu import loading
from specbuild.runtime.executors.registry import check_here
from specbuild.runtime.lossy.specpv.state import ViewGeometry

Change = Callable[[dict[str, Any]], object]


def read_changed(path: Path, change: Change) -> None:
    toy = toy_manifest()
    tensors = {"w": StoredTensor("F32", (4,), ("w",))}
    files = {**toy.files, "weights.safetensors": StoredFile(100, "0" * 32)}
    toy = replace(toy, tensors=tensors, files=files, specpv=SpecPv(16, 2, 256, 8, 64, 4096, 32))
    data = json.loads(json.dumps(stored_json(toy)))
    change(data)
    write_manifest(path, json.dumps(data).encode())
    read_manifest(path)


def in_limits(**values: int) -> Change:
    return lambda d: d["limits"].update(values)


def in_group(place: int, **values: object) -> Change:
    return lambda d: d["cache_groups"][place].update(values)


def with_pool(name: str, dtype: str, *shape: int) -> Change:
    port = {"name": name, "dtype": dtype, "shape": list(shape)}
    return lambda d: d["roles"]["target"]["inputs"].append(port)


def of_tensor(**values: object) -> Change:
    return lambda d: d["tensors"]["w"].update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: None, ""),
        (in_limits(max_seq_len=2**31 - 1), "the target has 4096 positions"),
        (
            in_limits(max_seq_len=4096),
            r"group full has \d+ pages, 3 sequences of up to 4096",
        ),
        (in_limits(max_batch_size=2**31 - 1), r"group full has \d+ pages, 2147483647 sequences"),
        (in_limits(max_batch_size=4), r"group sliding has \d+ pages, 4 sequences"),
        (in_limits(max_rows=2**31 - 1), "no launch has as many rows"),
        (in_limits(max_rows=512), r"cache group sliding has \d+ pages"),
        (in_limits(draft_tokens=2**31 - 1), "limits.draft_tokens is 2147483647"),
        (in_limits(draft_top_k=2**31 - 1), "cache group draft has"),
        (in_limits(draft_depth=2**31 - 1), "cache group sliding has"),
        (lambda d: d["draft_default"].update(draft_depth=5), "draft_default is 1 × 5, 2 tokens"),
        (in_group(0, pages=2), "group full has 2 pages"),
        (in_group(0, layers=[0, 0]), "layers are"),
        (in_group(0, page_size=5), "blocks of 16 tokens are not whole pages"),
        (with_pool("full.0.k_pool", "float32", 61, 1, 5, 1), r"its cache group's is float32 \["),
        (with_pool("full.0.k_pool", "int32", 61, 1, 4, 1), "full.0.k_pool is int32"),
        (with_pool("full.1.k_pool", "float32", 61, 1, 4, 1), "is no pool of a cache group"),
        (with_pool("full.0.c_pool", "float32", 61, 1, 4, 1), "is no pool of a cache group"),
        (with_pool("full.x", "float32", -1), r"full.x has shape \[-1\]"),
        (lambda d: d["specpv"].update(block_size=0), "specpv.block_size is 0"),
        (
            lambda d: d["specpv"].update(n_retrieval_blocks=2**31),
            "n_retrieval_blocks is 2147483648",
        ),
        (lambda d: d["specpv"].update(block_size=18), "blocks of 18 tokens are not whole pages"),
        (lambda d: d["specpv"].update(score="indexer"), "not whole pages of a cache group indexer"),
        (of_tensor(shape=[2**31]), r"tensor w has shape \[2147483648\]"),
        (of_tensor(shape=[-1]), r"tensor w has shape \[-1\]"),
        (of_tensor(shape=[2**30, 2**30]), "weights.safetensors has 100 bytes, its tensors take"),
        (of_tensor(dtype="F8"), "got 'F8', expected one of"),
        (
            lambda d: d["files"]["weights.safetensors"].update(bytes=2**50),
            "has 1125899906842624 bytes, its tensors take 16",
        ),
        (
            lambda d: d["files"]["graphs/any.onnx"].update(bytes=2**50),
            "no such file has over 268435456",
        ),
        (lambda d: d["files"].update({"a\x1b": d["files"]["graphs/any.onnx"]}), "has a name"),
    ],
)
def test_rejects_contradicting_numbers(tmp_path: Path, change: Change, said: str) -> None:
    if not said:
        read_changed(tmp_path, change)
        return
    with pytest.raises(EngineFileError, match=said) as refused:
        read_changed(tmp_path, change)
    assert "\n" not in str(refused.value)


def test_rejects_a_changed_page_size(tmp_path: Path) -> None:
    """16 → 17 in a manifest with new checksums once gave wrong tokens."""
    write_engine(tmp_path)
    data = stored_json(read_manifest(tmp_path))
    data["cache_groups"][0]["page_size"] += 1
    write_manifest(tmp_path, json.dumps(data).encode())
    with pytest.raises(EngineFileError, match=r"full\.0\.k_pool is float32"):
        read_manifest(tmp_path)


def test_rejects_pages_that_contradict_the_graph(tmp_path: Path) -> None:
    write_engine(tmp_path)
    data = stored_json(read_manifest(tmp_path))
    data["cache_groups"][0]["page_size"] += 1
    for port in (*data["roles"]["target"]["inputs"], *data["roles"]["target"]["outputs"]):
        if "_pool" in port["name"]:
            port["shape"] = [1, 20, 5, 4]
    write_manifest(tmp_path, json.dumps(data).encode())
    with pytest.raises(EngineFileError, match=r"is float32 \[1, 20, 4, 4\], the manifest says"):
        Engine.load(tmp_path)


def test_rejects_too_much_memory_before_allocating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consistent manifest has caches of 2^31 slots: one sentence, and no file is read."""
    write_engine(tmp_path)
    described = read_manifest(tmp_path)
    group = replace(described.cache_groups[0], pages=2**29 - 1)
    data = stored_json(replace(described, cache_groups=(group,)))
    for port in (*data["roles"]["target"]["inputs"], *data["roles"]["target"]["outputs"]):
        if "_pool" in port["name"]:
            port["shape"] = [1, group.pages, 4, 4]
    write_manifest(tmp_path, json.dumps(data).encode())
    here = replace(this_device(), available_bytes=8 << 30)
    reasons = check_here(read_manifest(tmp_path), tmp_path, here)
    assert reasons == ["weights, caches and outputs take 84.0 GiB, 8.0 GiB of memory are free"]
    monkeypatch.setattr(loading, "read_graphs", None)
    monkeypatch.setattr("specbuild.runtime.executors.registry.this_device", lambda: here)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedHereError, match=r"84.0 GiB, 8.0 GiB of memory are free"):
            Engine.load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_views_are_counted() -> None:
    plain, views = toy_manifest(), SpecPv(16, 2, 2**20, 8, 64, 4096, 32)
    held = table_bytes(replace(plain, specpv=views)) - table_bytes(plain)
    assert held >= 4 * plain.limits.max_batch_size * ViewGeometry(views, 4, deepest=5).entries


def test_every_listed_element_type_can_be_read() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == TENSOR_BYTES
