"""Engines that draft with a model's own MTP layer, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_checkpoints import VOCAB, add_predictor, quantise, write_deepseek
from llama_checkpoints import write_llama
from mimo_checkpoints import PlainMimoMtp, write_mimo
from qwen_predictors import add_qwen_predictor

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

LAYERS = 2


def built(folder: Path) -> Path:
    options = BuildOptions(
        model=folder / "model", draft=Path("mtp"), output=folder / "engine",
        limits=LimitOptions(max_seq_len=128),
    )  # fmt: skip
    build(options, SilentProgress())
    return options.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    write_deepseek(folder / "model")
    add_predictor(folder / "model")
    built(folder)
    return folder


def test_the_engine_stores_the_layer_without_embedding_and_head(folder: Path) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert drafter["geometry"]["aux_layers"] == [LAYERS - 1]
    assert manifest["warnings"] == []
    names = manifest["tensors"]
    assert {"draft.eh_proj.weight", "draft.self_attn.kv_b_proj.key"} <= set(names)
    assert not any("shared_head.head" in name or "draft.embed" in name for name in names)


def check(folder: Path) -> None:
    """Assert that all stages equal transformers, and that drafts change no token."""
    report = verify_engine(folder / "engine", folder / "model", None, SilentProgress())
    stages = {row.stage: row for row in report.rows}
    for stage in ("aux hidden states", "fuse", "draft attention", "draft ffn", "draft pre_head"):
        assert stages[stage].rows > 0
    assert max(row.max_error for row in report.rows) < 1e-4
    assert [row.name for row in report.losslessness] == [
        "greedy: without draft = transformers",
        "greedy: chain of 4 = without draft",
        "greedy: tree of 10 = without draft",
        "sampled: chain of 4 = without draft",
        "sampled: tree of 10 = without draft",
    ]
    assert report.passed


def test_verify_rejects_a_draft_for_an_mtp_layer(folder: Path) -> None:
    with pytest.raises(SpecbuildError, match="its draft is an MTP layer of the model"):
        verify_engine(folder / "engine", folder / "model", folder / "model", SilentProgress())


@pytest.mark.slow
def test_the_fp8_mtp_layer_of_glm(tmp_path: Path) -> None:
    """transformers' MTP path does not run this model, but its block does."""
    write_deepseek(tmp_path / "model", kind="glm4_moe_lite", dtype="bfloat16")
    add_predictor(tmp_path / "model")
    quantise(tmp_path / "model", (24, 20))
    built(tmp_path)
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
def test_an_mtp_layer_with_grouped_query_attention(tmp_path: Path, normed: bool) -> None:
    """In GLM-4.5, part of each head is rotated, and the layer has experts."""
    write_llama(tmp_path / "model", "glm4_moe", num_hidden_layers=LAYERS, use_qk_norm=normed)
    add_predictor(tmp_path / "model", layers=LAYERS)
    built(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_an_mtp_layer_of_a_model_with_recurrent_states(tmp_path: Path, kind: str) -> None:
    """The layer has keys and values, an output gate, and norms whose weights are stored minus 1."""
    types = ["linear_attention", "full_attention"]
    write_llama(tmp_path / "model", kind, num_hidden_layers=2, layer_types=types)
    add_qwen_predictor(tmp_path / "model", like=1, counted=kind == "qwen3_5_text")
    built(tmp_path)
    check(tmp_path)


def in_transformers(folder: Path) -> Any:
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # transformers identifies the MTP layer of published models by its number.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\..*"]
    model.config.name_or_path = str(folder / "model")
    return model


def test_logits_equal_the_layer_of_transformers(folder: Path) -> None:
    """Compare position by position, so that a shift by one would be detected."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = in_transformers(folder)
    predictor = MtpModel.from_pretrained(model)
    ids = np.random.default_rng(3).integers(0, VOCAB, 12).astype(np.int32)
    probe = EngineProbe(folder / "engine")
    with probe.sequence(len(ids)) as sequence:
        aux_hidden = sequence.extend("target", {"token_ids": ids})["captured"]
        hidden = probe.run("draft_fuse", {"captured": aux_hidden})["hidden"]
        feeds = {"token_ids": ids[1:], "hidden": hidden[:-1]}
        logits = sequence.extend("draft", feeds)["draft_logits"]
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    for end in (2, 5, len(ids)):
        with torch.no_grad():
            states = model.model(tokens[:, :end]).last_hidden_state
            _, expected, _ = predictor(
                input_ids=tokens[:, 1:end],
                last_hidden_states=states[:, :-1],
                attention_mask=torch.ones(1, end - 1, dtype=torch.long),
                position_ids=torch.arange(1, end)[None],
                mtp_cache=MtpCache(config=model.config.get_mtp_config()),
            )
        np.testing.assert_allclose(logits[end - 2], expected[0, 0].numpy(), atol=1e-4, rtol=1e-4)


def test_tokens_equal_generate_with_mtp(folder: Path) -> None:
    """The tokens also equal plain greedy decoding, for every draft shape.

    Some drafts are accepted.
    """
    engine = Engine.load(folder / "engine")
    prompts = [Prompt(id=str(i), prompt_ids=(3 + i, 7, 9)) for i in range(4)]
    params = GenerateParams(max_new_tokens=64, ignore_eos=True)
    model, accepted = in_transformers(folder), 0
    expected = [
        model.generate(
            torch.tensor([prompt.prompt_ids]), max_new_tokens=64, do_sample=False, use_mtp=True,
            eos_token_id=None, pad_token_id=0,
        )[0, 3:].tolist()
        for prompt in prompts
    ]  # fmt: skip
    for shape in (None, DraftShape(1, 1, 1), DraftShape(1, 4, 4), DraftShape(8, 3, 48)):
        for event in engine.generate(prompts, params, speculation=shape):
            if isinstance(event, FinishEvent):
                assert list(event.record.output_ids) == expected[event.request]
                accepted += sum(event.record.stats.acceptance_histogram[1:])
    assert accepted > 20


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainMimoMtp]:
    folder = tmp_path_factory.mktemp("mimo")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    tensors = write_mimo(folder / "model", rope_parameters=rope)
    built(folder)
    return folder, PlainMimoMtp(tensors, heads=4, kv_heads=2, eps=0.02, theta=500.0)


def test_logits_of_mimo_equal_its_formula(mimo: tuple[Path, PlainMimoMtp]) -> None:
    """transformers has no class for it: compare position by position with plain torch."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder, plain = mimo
    config = Qwen2Config.from_pretrained(folder / "model")
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", config=config, dtype=torch.float32)
    ids = np.random.default_rng(3).integers(0, VOCAB, 12).astype(np.int32)
    with torch.no_grad():
        states = model.eval().model(torch.from_numpy(ids.astype(np.int64))[None])
    hidden = states.last_hidden_state[0]
    probe = EngineProbe(folder / "engine")
    with probe.sequence(len(ids)) as sequence:
        aux_hidden = sequence.extend("target", {"token_ids": ids})["captured"]
        fused = probe.run("draft_fuse", {"captured": aux_hidden})["hidden"]
        np.testing.assert_allclose(fused, hidden.numpy(), atol=1e-4, rtol=1e-4)
        feeds = {"token_ids": ids[1:], "hidden": fused[:-1]}
        logits = sequence.extend("draft", feeds)["draft_logits"]
    for end in (2, 5, len(ids)):
        expected = plain.follow(hidden[: end - 1], ids[1:end].tolist(), [])[0]
        np.testing.assert_allclose(logits[end - 2], expected.numpy(), atol=1e-4, rtol=1e-4)
