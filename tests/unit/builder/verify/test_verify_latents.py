"""Engines whose layers cache latents: every stage against transformers, and losslessness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from engine_sizes import compute_engine_sizes
from latent_files import write_latents

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, LimitOptions, SpecPvOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.runtime.device import pool_bytes
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest_check import check_manifest
from specbuild.runtime.errors import EngineFileError, SpecbuildError

DIMS = {0: 12, 1: 20, 3: 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent") / "target"
    write_target(path)
    write_draft(path.parent / "draft")
    write_latents(path, DIMS)
    return path


def options(model: Path, output: Path) -> BuildOptions:
    return BuildOptions(
        model=model,
        draft=model.parent / "draft",
        output=output,
        limits=LimitOptions(max_seq_len=128, max_batch_size=2),
    )


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engine") / "latent"
    build(options(model, output), SilentProgress())
    return output


@pytest.mark.slow
def test_every_stage_passes_and_drafts_change_no_token(engine: Path, model: Path) -> None:
    """Use one sequence in a launch, and several."""
    report = verify_engine(engine, model, model.parent / "draft", SilentProgress())
    assert [row for row in (*report.rows, *report.losslessness) if not row.passed] == []


def test_the_cache_has_one_latent_a_token_and_no_unused_weights(engine: Path, model: Path) -> None:
    latent, checkpoint = read_manifest(engine), read_target(model, strict=True, mla=False)
    engine_sizes = compute_engine_sizes(options(model, engine), checkpoint.geometry, latent.draft)
    groups = {g.name: (g.layers, g.latent_widths, g.window) for g in latent.cache_groups}
    assert groups == {
        "latent": ((1, 3), (20, 8), 0),
        "sliding": ((2,), (), 8),
        "latent_sliding": ((0,), (12,), 8),
        "draft": ((0,), (), 0),
    }
    held = predict_memory(latent).kv_bytes
    all_held = {group.name: pool_bytes(group) for group in engine_sizes.groups}
    elements = 2 * 32  # keys and values of 2 heads of 16
    assert held["latent"] * 2 * elements == all_held["full"] * (20 + 8)
    assert held["latent_sliding"] * elements == held["sliding"] * 12
    replaced = latent.replaced["model.layers.1.self_attn.v_proj.weight"]
    assert replaced == "model.layers.1.self_attn.mla_W_v_lat"
    assert not set(latent.replaced) & set(latent.tensors) and checkpoint.replaced == {}
    assert not any("mla" in name for name in checkpoint.tensors)


def test_the_error_names_latents_that_differ_from_the_engine(engine: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "other")
    write_latents(tmp_path / "other", {0: 12})
    with pytest.raises(SpecbuildError, match=r"latents of \[12, 20, 0, 8\] values, but those"):
        verify_engine(engine, tmp_path / "other", None, SilentProgress())


def test_specpv_requires_a_layer_that_caches_keys(model: Path, tmp_path: Path) -> None:
    plain = options(model, tmp_path / "engine")
    paged = replace(plain.limits, page_size=32)
    build_options = replace(plain, limits=paged, specpv=SpecPvOptions(enabled=True))
    with pytest.raises(SpecbuildError, match=r"layers 1, 3 cache latents .* --no-mla or without"):
        build(build_options, SilentProgress())
    with pytest.raises(SpecbuildError, match="no multiple of the page size 32"):
        build(replace(build_options, no_mla=True), SilentProgress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_widths": (20,)}, "latent_widths are"),
        ({"latent_widths": (20, 0)}, "expected 2 from 1 to 20"),
        ({"kv_heads": 2}, "2 heads share a latent"),
    ],
)
def test_rejects_a_manifest_with_invalid_latents(
    engine: Path, changes: dict[str, object], message: str
) -> None:
    manifest = read_manifest(engine)
    groups = tuple(
        replace(g, **changes) if g.name == "latent" else g  # type: ignore[arg-type]
        for g in manifest.cache_groups
    )
    with pytest.raises(EngineFileError, match=message):
        check_manifest(replace(manifest, cache_groups=groups))
