"""Indexers in a checkpoint's folder: used on request, and rejected if they do not match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from engine_sizes import compute_engine_sizes
from indexer_files import INDEXER_FILE, write_indexers
from safetensors.torch import save_file

from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, DsaOptions, LimitOptions
from specbuild.runtime.engine_dir.geometry import IndexerGeometry
from specbuild.runtime.engine_dir.manifest import Dsa
from specbuild.runtime.errors import SpecbuildError

W_Q = "model.layers.1.self_attn.dsa_W_q"
W_K = "model.layers.1.self_attn.dsa_W_k"
W_H = "model.layers.1.self_attn.dsa_W_h"


def write(path: Path, attention: dict[str, Any] | None = None, **options: Any) -> None:
    changes = None if attention is None else {"attention": attention}
    write_target(path, config_changes=changes, **options)


@pytest.mark.parametrize("options", [{}, {"layout": "original"}])
@pytest.mark.parametrize("heads", [1, 3])
def test_indexers_are_read_on_request(tmp_path: Path, options: dict[str, Any], heads: int) -> None:
    write(tmp_path, **options)
    tensors = write_indexers(tmp_path, [1, 3], heads=heads, width=12)
    target = read_target(tmp_path, strict=True, dsa=True)
    assert target.geometry.indexer == IndexerGeometry((1, 3), heads, 12, weighted=heads > 1)
    assert all(torch.equal(target.tensors[name].load(), t) for name, t in tensors.items())
    assert "--no-dsa leaves it out" in target.warnings[-1] and "2 layers" in target.warnings[-1]


def test_the_indexer_file_is_not_read_as_a_shard(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    write_indexers(tmp_path, [1, 3])
    assert read_target(tmp_path, strict=True, dsa=False).geometry.indexer is None
    assert read_target(tmp_path, strict=True, dsa=True).geometry.indexer is not None


def test_indexers_are_disabled_by_default(tmp_path: Path) -> None:
    write(tmp_path)
    plain = read_target(tmp_path, strict=True)
    write_indexers(tmp_path, [1])
    unasked = read_target(tmp_path, strict=True)
    assert unasked.geometry == plain.geometry and unasked.tensors.keys() == plain.tensors.keys()
    assert unasked.warnings[-1].startswith(f"target: {INDEXER_FILE} is not used")
    assert read_target(tmp_path, strict=True, dsa=False).warnings == plain.warnings
    write(tmp_path, {"enable_dsa_indexer": True, "dsa_top_k": 9, "dsa_threshold": 0})
    enabled = read_target(tmp_path, strict=True).geometry.indexer
    assert enabled is not None and (enabled.top_k, enabled.threshold) == (9, 0)
    assert read_target(tmp_path, strict=True, dsa=False).geometry.indexer is None


def test_a_single_head_may_have_a_weight(tmp_path: Path) -> None:
    write(tmp_path)
    tensors = write_indexers(tmp_path, [1], heads=1)
    save_file({**tensors, W_H: torch.randn(64, 1)}, tmp_path / INDEXER_FILE)
    indexer = read_target(tmp_path, strict=True, dsa=True).geometry.indexer
    assert indexer == IndexerGeometry((1,), 1, 8, weighted=True)


def test_rejects_a_model_without_indexers(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(SpecbuildError, match=r"--dsa, but .* has no dsa_indexer\.safetensors"):
        read_target(tmp_path, strict=True, dsa=True)
    write(tmp_path, {"enable_dsa_indexer": True})
    with pytest.raises(SpecbuildError, match=r"enable_dsa_indexer is true, but .* has no dsa_inde"):
        read_target(tmp_path, strict=True)
    assert read_target(tmp_path, strict=True, dsa=False).geometry.indexer is None
    save_file({}, tmp_path / INDEXER_FILE)
    with pytest.raises(SpecbuildError, match="holds no indexers; a full-attention layer has"):
        read_target(tmp_path, strict=True)


@pytest.mark.parametrize("absent", ["q", "k", "h"])
def test_rejects_a_layer_with_missing_indexer_tensors(tmp_path: Path, absent: str) -> None:
    write(tmp_path)
    tensors = write_indexers(tmp_path, [1, 3])
    del tensors[f"model.layers.3.self_attn.dsa_W_{absent}"]
    save_file(tensors, tmp_path / INDEXER_FILE)
    with pytest.raises(SpecbuildError, match=f"missing: model.layers.3.self_attn.dsa_W_{absent}"):
        read_target(tmp_path, strict=True, dsa=True)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (W_K, (32, 8), r"wrong shape: .*dsa_W_k: got \[32, 8\], expected \[64, 8\]"),
        (W_Q, (64, 18), r"wrong shape: .*dsa_W_q: got \[64, 18\], expected \[64, 16\]"),
        (W_Q, (64, 4), r"wrong shape: .*dsa_W_q: got \[64, 4\], expected \[64, 8\]"),
        (W_H, (64, 3), r"wrong shape: .*dsa_W_h: got \[64, 3\], expected \[64, 2\]"),
        (W_K, (8, 8, 8), "wrong shape"),
        ("model.layers.3.self_attn.dsa_W_k", (64, 4), r"layers\.3\.self_attn\.dsa_W_k: got \[64"),
        ("model.layers.0.self_attn.dsa_W_k", (64, 8), "layers 0 have a window"),
        ("model.layers.9.self_attn.dsa_W_k", (64, 8), r"left over: model\.layers\.9"),
        ("model.layers.1.self_attn.k_proj.weight", (32, 64), "left over"),
    ],
)
def test_rejects_tensors_of_another_checkpoint(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    write(tmp_path)
    tensors = write_indexers(tmp_path, [1, 3])
    tensors[name] = torch.randn(shape)
    save_file(tensors, tmp_path / INDEXER_FILE)
    with pytest.raises(SpecbuildError, match=message):
        read_target(tmp_path, strict=True, dsa=True)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"dsa_top_k": 0}, "dsa_top_k: got 0, expected a whole number of 1 or more"),
        ({"dsa_threshold": -1}, "dsa_threshold: got -1, expected a whole number of 0 or more"),
        ({"dsa_topk": 5}, "unknown fields dsa_topk"),
    ],
)
def test_rejects_a_config_that_does_not_match(
    tmp_path: Path, attention: dict[str, Any], message: str
) -> None:
    write(tmp_path, {"enable_dsa_indexer": True, **attention})
    write_indexers(tmp_path, [1])
    with pytest.raises(SpecbuildError, match=message):
        read_target(tmp_path, strict=True)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indexed")
    write(path, {"enable_dsa_indexer": True, "dsa_top_k": 30, "dsa_threshold": 50})
    write_indexers(path, [1])
    return path


def planned(path: Path, **options: Any) -> Dsa | None:
    build_options = BuildOptions.from_flat(
        model=path, output=path / "e", max_seq_len=256, **options
    )
    return compute_engine_sizes(
        build_options, read_target(path, strict=True, dsa=build_options.dsa.enabled).geometry, None
    ).dsa


def test_options_override_the_config_which_overrides_defaults(indexed: Path) -> None:
    assert planned(indexed) == Dsa(30, 50, 4, 64, 0.75, 64)
    chosen = planned(indexed, dsa=True, dsa_top_k=7, dsa_min_agreement=0.5, dsa_check_interval=0)
    assert chosen == Dsa(7, 50, 4, 64, 0.5, 0)
    assert planned(indexed, dsa=False) is None
    assert planned(indexed, dsa_key_dtype="fp8") == Dsa(30, 50, 4, 64, 0.75, 64, "fp8")
    for backend, key_dtype, dtype in (
        ("cuda", "fp8", "float8_e4m3fn"), ("cuda", None, "bfloat16"), ("cpu", "fp8", "float32"),
    ):  # fmt: skip
        build_options = BuildOptions(
            model=indexed,
            output=indexed / "e",
            limits=LimitOptions(max_seq_len=256),
            backend=backend,
            dsa=DsaOptions(key_dtype=key_dtype),
        )
        engine_sizes = compute_engine_sizes(
            build_options, read_target(indexed, strict=True).geometry, None
        )
        assert engine_sizes.indexer_group is not None and engine_sizes.indexer_group.dtype == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dsa": False, "dsa_top_k": 5}, "--dsa-top-k needs --dsa; add it"),
        ({"dsa": False, "dsa_key_dtype": "fp8"}, "--dsa-key-dtype needs --dsa; add it"),
        ({"dsa_top_k": 0}, "--dsa-top-k is 0; it must be at least 1"),
        ({"dsa_recent_tokens": 0}, "--dsa-recent-tokens is 0; it must be at least 1"),
        ({"dsa_check_interval": -1}, "--dsa-check-interval is -1; it must be at least 0"),
        ({"dsa_min_agreement": 1.5}, "--dsa-min-agreement is 1.5, a share of tokens"),
        ({"dsa": True, "dsa_threshold": 256}, "--dsa-threshold 256 is never passed"),
    ],
)
def test_rejects_invalid_numbers(indexed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        planned(indexed, **options)
