"""The text part of multimodal checkpoints: the values read, and equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config
from family_engines import build_drafted_engine, check_stages
from llama_checkpoints import OF_KIND, SIZES, randomise
from qwen_predictors import add_qwen_predictor

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.verify import verify_engine
from specbuild.runtime.errors import SpecbuildError

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


QWEN_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip


GEMMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def write_wrapped(path: Path, text_kind: str, **changes: Any) -> None:
    """Write a random multimodal model with a text model of this type."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    text = SIZES | OF_KIND[text_kind] | {"model_type": text_kind}
    options: dict[str, Any] = {"text_config": text, **changes}
    if not text_kind.startswith(("qwen3", "gemma4")):
        options["image_token_index"] = 30
    model: Any
    if text_kind == "qwen3_vl_text":
        config = Qwen3VLConfig(vision_config=QWEN_VISION, **options)
        model = Qwen3VLForConditionalGeneration(config)
    elif text_kind == "qwen3_5_text":
        vision = {name: size for name, size in QWEN_VISION.items() if "deepstack" not in name}
        config = Qwen3_5Config(vision_config=vision, **options)
        model = Qwen3_5ForConditionalGeneration(config)
    elif text_kind == "gemma4_text":
        config = Gemma4Config(vision_config=GEMMA4_VISION, audio_config=None, **options)
        model = Gemma4ForConditionalGeneration(config)
    elif text_kind == "gemma3_text":
        places = {"boi_token_index": 28, "eoi_token_index": 29, "mm_tokens_per_image": 4}
        config = Gemma3Config(vision_config=VISION, **places, **options)
        model = Gemma3ForConditionalGeneration(config)
    else:
        config = Mistral3Config(vision_config=VISION | {"head_dim": 8}, **options)
        model = Mistral3ForConditionalGeneration(config)
    randomise(model, text_kind)
    model.save_pretrained(path)


@pytest.mark.parametrize("kind", ["gemma3_text", "ministral3"])
def test_the_text_part_is_read_and_the_rest_is_reported(tmp_path: Path, kind: str) -> None:
    write_wrapped(tmp_path, kind, tie_word_embeddings=True)
    target = read_target(tmp_path, strict=True)
    assert target.geometry.model_type == kind and target.geometry.tied_head
    (warning,) = target.warnings
    assert "multi_modal_projector (" in warning and "vision_tower (" in warning
    source = target.tensors["model.layers.0.mlp.up_proj.weight"]
    assert source.sources == ("language_model.model.layers.0.mlp.up_proj.weight",)


def test_a_separate_head_is_not_tied(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "ministral3", tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=None)
    target = read_target(tmp_path, strict=True)
    assert not target.geometry.tied_head
    assert not torch.equal(
        target.tensors["lm_head.weight"].load(), target.tensors["model.embed_tokens.weight"].load()
    )


def test_the_error_names_the_type_of_an_unknown_text_model(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "ministral3", tie_word_embeddings=True)
    edit_config(tmp_path, text_config={"model_type": "mamba"})
    with pytest.raises(SpecbuildError, match="text_config: model_type 'mamba' is not supported"):
        read_target(tmp_path, strict=True)


def test_qwen3_vl_without_images_equals_qwen3(tmp_path: Path) -> None:
    """The reference of ``verify`` gives the logits of the multimodal class."""
    from transformers import Qwen3VLForConditionalGeneration

    write_wrapped(tmp_path, "qwen3_vl_text", tie_word_embeddings=False)
    (warning,) = read_target(tmp_path, strict=True).warnings
    assert "visual (" in warning
    whole = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    text = load_target(tmp_path, teacher=False)
    ids = torch.arange(3, 28)[None]
    with torch.no_grad():
        expected, result = whole(ids).logits, text(ids, use_cache=False).logits
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_gemma_4_is_read_without_its_vision_part(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "gemma4_text", tie_word_embeddings=True)
    target = read_target(tmp_path, strict=True)
    assert target.geometry.model_type == "gemma4_text" and target.geometry.tied_head
    (warning,) = target.warnings
    assert "embed_vision (" in warning and "vision_tower (" in warning
    source = target.tensors["model.layers.0.layer_scalar"]
    assert source.sources == ("model.language_model.layers.0.layer_scalar",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gemma3_text", "gemma4_text", "ministral3", "qwen3_vl_text", "qwen3_5_text"]
)
def test_an_engine_of_the_text_part_equals_transformers(tmp_path: Path, kind: str) -> None:
    write_wrapped(tmp_path / "model", kind, tie_word_embeddings=kind != "qwen3_vl_text")
    build_drafted_engine(tmp_path, OF_KIND[kind])
    check_stages(tmp_path)


@pytest.mark.slow
def test_an_mtp_layer_of_a_multimodal_checkpoint_drafts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_wrapped(model, "qwen3_5_text", tie_word_embeddings=False)
    add_qwen_predictor(model, like=3, prefix="model.language_model.")
    (left_out, unused) = read_target(model, strict=False).warnings[-2:]
    assert "visual (" in left_out and "--draft mtp drafts with it" in unused
    options = BuildOptions(
        model=model, draft=Path("mtp"), output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=128),
    )  # fmt: skip
    build(options, SilentProgress())
    report = verify_engine(tmp_path / "engine", model, None, SilentProgress())
    assert report.passed and len(report.losslessness) == 5
    assert max(row.max_error for row in report.rows) < 1e-4
