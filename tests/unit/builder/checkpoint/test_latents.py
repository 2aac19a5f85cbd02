"""Latents in a checkpoint's folder: found by name, optional, and rejected if they do not match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from latent_files import write_latents
from safetensors.torch import save_file

from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.errors import SpecbuildError

W_C = "model.layers.1.self_attn.mla_W_c"
K_LAT = "model.layers.1.self_attn.mla_W_k_lat"


def write(path: Path, attention: dict[str, Any] | None = None, **options: Any) -> None:
    changes = None if attention is None else {"attention": attention}
    write_target(path, config_changes=changes, **options)


@pytest.mark.parametrize("options", [{}, {"shards": 2}, {"layout": "original"}])
def test_latents_are_found_in_the_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path, **options)
    tensors = write_latents(tmp_path, {1: 12, 3: 20})
    target = read_target(tmp_path, strict=True)
    assert target.geometry.latent_dims == (0, 12, 0, 20)
    assert all(torch.equal(target.tensors[name].load(), t) for name, t in tensors.items())
    assert target.replaced == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": (
            f"model.layers.{layer}.self_attn.mla_W_{part}_lat"
        )
        for layer in (1, 3)
        for part in "kv"
    }
    assert "mla_kv.safetensors" in target.warnings[-1] and "{1,3}" in target.warnings[-1]


def test_latents_can_be_disabled_by_option_and_config(tmp_path: Path) -> None:
    write(tmp_path)
    plain = read_target(tmp_path, strict=True)
    write_latents(tmp_path, {1: 12})
    assert read_target(tmp_path, strict=True, mla=False).geometry == plain.geometry
    write(tmp_path, {"use_mla_kv": False})
    assert read_target(tmp_path, strict=True).geometry == plain.geometry


@pytest.mark.parametrize("expected", [12, [12], [0, 12, 0, 0]])
def test_the_config_may_state_their_width(tmp_path: Path, expected: Any) -> None:
    write(tmp_path, {"use_mla_kv": True, "mla_latent_dim": expected})
    write_latents(tmp_path, {1: 12})
    assert read_target(tmp_path, strict=True).geometry.latent_dims == (0, 12, 0, 0)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"mla_latent_dim": 16}, r"mla_latent_dim: got 16, expected .* \[0, 12, 0, 0\]"),
        ({"mla_latent_dim": [12, 12, 12, 12]}, r"mla_latent_dim: got \[12"),
        ({"use_mla_kv": "yes"}, "use_mla_kv: got 'yes', expected true or false"),
        ({"enable_dsa_indexer": "on"}, "enable_dsa_indexer: got .on., expected true or false"),
        ({"use_mla": True}, "unknown fields use_mla"),
    ],
)
def test_rejects_a_config_that_does_not_match(
    tmp_path: Path, attention: dict[str, Any], message: str
) -> None:
    write(tmp_path, attention)
    write_latents(tmp_path, {1: 12})
    with pytest.raises(SpecbuildError, match=message):
        read_target(tmp_path, strict=True)


def test_rejects_a_config_with_latents_without_the_file(tmp_path: Path) -> None:
    write(tmp_path, {"use_mla_kv": True})
    with pytest.raises(SpecbuildError, match=r"has no mla_kv\.safetensors; .* retrofit mla"):
        read_target(tmp_path, strict=True)
    assert read_target(tmp_path, strict=True, mla=False).geometry.latent_dims == ()


def test_rejects_a_layer_with_missing_latent_tensors(tmp_path: Path) -> None:
    for absent in ("mla_W_c", "mla_W_k_lat", "mla_W_v_lat"):
        write(tmp_path)
        tensors = write_latents(tmp_path, {1: 12, 2: 8})
        del tensors[f"model.layers.1.self_attn.{absent}"]
        save_file(tensors, tmp_path / "mla_kv.safetensors")
        with pytest.raises(SpecbuildError, match=f"missing: model.layers.1.self_attn.{absent}"):
            read_target(tmp_path, strict=True)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (W_C, (32, 12), r"wrong shape: .*mla_W_c: got \[32, 12\], expected \[64, 12\]"),
        (K_LAT, (12, 16), r"wrong shape: .*W_k_lat: got \[12, 16\], expected \[12, 32\]"),
        (K_LAT, (13, 32), r"wrong shape: .*W_k_lat: got \[13, 32\], expected \[12, 32\]"),
        (K_LAT, (12, 4, 8), r"wrong shape"),
        ("model.layers.9.self_attn.mla_W_c", (64, 12), r"left over: model\.layers\.9"),
        ("model.layers.1.self_attn.k_proj.weight", (32, 64), r"left over"),
    ],
)
def test_rejects_tensors_of_another_checkpoint(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    write(tmp_path)
    tensors = write_latents(tmp_path, {1: 12})
    tensors[name] = torch.randn(shape)
    save_file(tensors, tmp_path / "mla_kv.safetensors")
    with pytest.raises(SpecbuildError, match=message):
        read_target(tmp_path, strict=True)


def test_rejects_more_than_the_full_rank(tmp_path: Path) -> None:
    write(tmp_path)
    write_latents(tmp_path, {0: 64})
    assert read_target(tmp_path, strict=True).geometry.latent_dims == (64, 0, 0, 0)
    write_latents(tmp_path, {0: 65})
    with pytest.raises(SpecbuildError, match=r"full rank of 64 \(layer 0: 65\)"):
        read_target(tmp_path, strict=True)
    save_file({}, tmp_path / "mla_kv.safetensors")
    with pytest.raises(SpecbuildError, match="holds no latents"):
        read_target(tmp_path, strict=True)


def test_widths_are_listed_in_the_order_of_layers(tmp_path: Path) -> None:
    changes = {"attention": {"mla_latent_dim": [0, 12, 0, 8]}}
    write_target(tmp_path, config_changes=changes)
    write_latents(tmp_path, {1: 8, 3: 12})
    with pytest.raises(SpecbuildError, match=r"mla_latent_dim: got \[0, 12, 0, 8\]"):
        read_target(tmp_path, strict=True)
