"""Engines whose layers cache latents: every stage against transformers, and losslessness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from latent_files import write_latents

from specbuild.builder.build import build
from specbuild.builder.config import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.cli.predicted_memory import predict_memory
from specbuild.runtime.engine_file import read_manifest
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.manifest_check import check_manifest

DIMS = {0: 12, 1: 20, 3: 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent") / "target"
    write_target(path)
    write_draft(path.parent / "draft")
    write_latents(path, DIMS)
    return path


def options(model: Path, output: Path, batch: int) -> BuildOptions:
    return BuildOptions(
        model=model,
        draft=model.parent / "draft",
        output=output,
        max_seq_len=128,
        max_batch_size=batch,
    )


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for one sequence at a time."""
    output = tmp_path_factory.mktemp("engine") / "latent"
    build(options(model, output, 1), SilentProgress())
    return output


def assert_verified(engine: Path, model: Path) -> None:
    report = verify_engine(engine, model, model.parent / "draft", SilentProgress())
    assert [row for row in (*report.rows, *report.losslessness) if not row.passed] == []


def test_every_stage_passes_and_no_draft_changes_a_token(engine: Path, model: Path) -> None:
    assert_verified(engine, model)


def test_and_with_several_sequences_in_a_launch(model: Path, tmp_path: Path) -> None:
    build(options(model, tmp_path / "engine", 2), SilentProgress())
    assert_verified(tmp_path / "engine", model)


def test_the_cache_holds_a_latent_a_token_and_the_weights_stay_out(
    engine: Path, model: Path, tmp_path: Path
) -> None:
    build(replace(options(model, tmp_path / "plain", 1), no_mla=True), SilentProgress())
    latent, plain = (read_manifest(path) for path in (engine, tmp_path / "plain"))
    groups = {g.name: (g.layers, g.latent_widths, g.window) for g in latent.cache_groups}
    assert groups == {
        "latent": ((1, 3), (20, 8), 0),
        "sliding": ((2,), (), 8),
        "latent_sliding": ((0,), (12,), 8),
        "draft": ((0,), (), 0),
    }
    held, all_held = predict_memory(latent).kv_bytes, predict_memory(plain).kv_bytes
    elements = 2 * 32  # keys and values of 2 heads of 16
    assert held["latent"] * 2 * elements == all_held["full"] * (20 + 8)
    assert held["latent_sliding"] * elements == held["sliding"] * 12
    replaced = latent.replaced["model.layers.1.self_attn.v_proj.weight"]
    assert replaced == "model.layers.1.self_attn.mla_W_v_lat"
    assert not set(latent.replaced) & set(latent.tensors) and plain.replaced == {}
    assert not any("mla" in name for name in plain.tensors)


def test_other_latents_than_the_engines_are_named(engine: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "other")
    write_latents(tmp_path / "other", {0: 12})
    with pytest.raises(SpecbuildError, match=r"latents of \[12, 20, 0, 8\] values, but those"):
        verify_engine(engine, tmp_path / "other", None, SilentProgress())


def test_cuda_says_what_to_do_instead(model: Path, tmp_path: Path) -> None:
    asked = replace(options(model, tmp_path / "engine", 1), backend="cuda")
    with pytest.raises(SpecbuildError, match=r"cache latents .* --backend cpu or --no-mla"):
        build(asked, SilentProgress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_widths": (20,)}, "latent_widths are"),
        ({"latent_widths": (20, 0)}, "expected 2 from 1 to 20"),
        ({"kv_heads": 2}, "2 heads share a latent"),
    ],
)
def test_a_manifest_whose_latents_make_no_sense_is_refused(
    engine: Path, changes: dict[str, object], message: str
) -> None:
    manifest = read_manifest(engine)
    groups = tuple(
        replace(g, **changes) if g.name == "latent" else g  # type: ignore[arg-type]
        for g in manifest.cache_groups
    )
    with pytest.raises(EngineFileError, match=message):
        check_manifest(replace(manifest, cache_groups=groups))
