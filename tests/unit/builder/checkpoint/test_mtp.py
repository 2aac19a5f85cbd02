"""The MTP layer of a target's checkpoint as a draft: the values read, and rejected layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors
from deepseek_checkpoints import HIDDEN, LAYERS, add_predictor, write_deepseek
from engine_sizes import compute_engine_sizes
from mimo_checkpoints import LAYER, write_mimo
from safetensors.torch import load_file

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.engine.draft_window import windowed_draft
from specbuild.builder.families.checkpoints import is_own_draft, read_own_draft, read_target
from specbuild.builder.options import BuildOptions, DraftOptions
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.features import used_features
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

FIRST = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / "model"
    write_deepseek(path)
    add_predictor(path)
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may edit."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def target_of(path: Path) -> TargetGeometry:
    return read_target(path, strict=True, own_draft=True).geometry


def read(path: Path) -> DraftCheckpoint:
    return read_own_draft(path, target_of(path), strict=True)


def refusal(path: Path) -> str:
    with pytest.raises(SpecbuildError) as error:
        read(path)
    return str(error.value)


def test_the_layer_is_a_block_of_the_kind_of_the_target(written: Path) -> None:
    target, draft = target_of(written), read(written)
    d = draft.geometry
    assert isinstance(d, MtpGeometry) and draft.warnings == ()
    assert (d.mla, d.rope, d.feed_forward) == (target.mla, target.rope, target.feed_forward(1))
    assert (d.aux_layers, d.vocab, d.d2t_form) == ((LAYERS - 1,), target.vocab, "identity")
    assert draft.tensors["self_attn.kv_b_proj.key"].shape == (4, 24, 32)
    stored = load_file(written / "model.safetensors")
    projection = draft.tensors["eh_proj.weight"]
    assert projection.shape == (HIDDEN, 2 * HIDDEN)
    assert torch.equal(projection.load(), stored[f"{FIRST}eh_proj.weight"])
    assert not any("head.head" in name or "embed" in name for name in draft.tensors)


def test_an_unused_mtp_layer_is_reported(written: Path) -> None:
    (warning,) = read_target(written, strict=True).warnings
    assert f"layer {LAYERS} predicts further tokens (MTP) and is left out" in warning
    assert "--draft mtp drafts with it" in warning
    assert read_target(written, strict=True, own_draft=True).warnings == ()


def test_the_cache_of_the_layer_has_one_entry_a_token(written: Path, tmp_path: Path) -> None:
    options = BuildOptions(model=written, output=tmp_path / "engine")
    engine_sizes = compute_engine_sizes(options, target_of(written), read(written).geometry)
    group = engine_sizes.groups[-1]
    assert (group.name, group.kv_heads, group.latent_widths) == ("draft", 1, (48,))


def test_warns_of_copies_that_differ(model: Path) -> None:
    edit_tensors(model, lambda t: t[f"{FIRST}shared_head.head.weight"].zero_())
    (warning,) = read(model).warnings
    assert "shared_head.head.weight differs from lm_head.weight, which is used" in warning
    edit_tensors(model, lambda t: t.pop(f"{FIRST}shared_head.head.weight"))
    assert read(model).warnings == ()


def test_the_first_of_several_layers_drafts(model: Path) -> None:
    edit_config(model, num_nextn_predict_layers=2)
    (warning,) = read(model).warnings
    assert "the first of 2 MTP layers drafts all levels" in warning


def test_rejects_tensors_that_do_not_match(model: Path) -> None:
    edit_tensors(model, lambda t: t.pop(f"{FIRST}enorm.weight"))
    assert f"MTP layer {LAYERS}: 1 tensor does not fit the model" in refusal(model)
    assert "missing: enorm.weight" in refusal(model)
    edit_config(model, num_nextn_predict_layers=0)
    edit_tensors(model, lambda t: [t.pop(n) for n in list(t) if n.startswith(FIRST)])
    assert "has no supported MTP layer (num_nextn_predict_layers" in refusal(model)
    edit_config(model, num_nextn_predict_layers=1)
    assert f"has an MTP layer, but no tensor starts with {FIRST}" in refusal(model)


def test_rejects_unsupported_layers(written: Path, tmp_path: Path) -> None:
    draft = read(written).geometry
    build_options = BuildOptions(
        model=written, output=tmp_path / "engine", drafting=DraftOptions(window=8)
    )
    with pytest.raises(SpecbuildError, match="--draft-window 8: an MTP layer attends to every"):
        windowed_draft(draft, build_options)
    with pytest.raises(SpecbuildError, match="build with --backend cpu"):
        require_cuda_support(target_of(written), draft)


def test_a_directory_named_mtp_is_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_own_draft(Path("mtp")) and not is_own_draft(Path("other"))
    (tmp_path / "mtp").mkdir()
    assert not is_own_draft(Path("mtp"))


def test_the_layer_of_mimo_is_read_with_names_of_deepseek(tmp_path: Path) -> None:
    """Its projection reads the hidden state first, and its attention uses keys and values."""
    stored = write_mimo(tmp_path / "model")
    target, draft = target_of(tmp_path / "model"), read(tmp_path / "model")
    d = draft.geometry
    assert isinstance(d, MtpGeometry) and draft.warnings == ()
    assert (target.attention.qkv_bias, target.attention.output_bias) == (True, False)
    assert (d.mla, d.latent_dims, d.kv_heads, d.head_dim, d.rotated) == (None, (), 2, 16, 16)
    assert (d.aux_layers, d.feed_forward) == ((2,), target.feed_forward(2))
    assert used_features(d) == ("mtp", "mtp_keys_values")
    assert "self_attn.q_proj.bias" in draft.tensors
    projection = draft.tensors["eh_proj.weight"].load()
    desired = stored[f"{LAYER}input_proj.weight"]
    assert torch.equal(projection[:, 64:], desired[:, :64])
    assert torch.equal(projection[:, :64], desired[:, 64:])
    assert torch.equal(
        draft.tensors["enorm.weight"].load(), stored[f"{LAYER}token_layernorm.weight"]
    )
    options = BuildOptions(model=tmp_path / "model", output=tmp_path / "engine")
    group = compute_engine_sizes(options, target, d).groups[-1]
    assert (group.name, group.kv_heads, group.k_width, group.latent_widths) == ("draft", 2, 16, ())
    (warning,) = read_target(tmp_path / "model", strict=True).warnings
    assert "layer 0 predicts further tokens (MTP) and is left out" in warning


def test_rejects_tensors_of_mimo_that_do_not_match(tmp_path: Path) -> None:
    """Errors have the names on disk; tensors that config.json does not announce are ignored."""
    write_mimo(tmp_path / "model")
    edit_tensors(tmp_path / "model", lambda t: t.pop(f"{LAYER}token_layernorm.weight"))
    assert "MTP layer 0: 1 tensor does not fit" in refusal(tmp_path / "model")
    assert "missing: token_layernorm.weight" in refusal(tmp_path / "model")
    edit_config(tmp_path / "model", num_nextn_predict_layers=0)
    with pytest.raises(SpecbuildError, match=r"left over: model\.mtp_layers"):
        target_of(tmp_path / "model")
