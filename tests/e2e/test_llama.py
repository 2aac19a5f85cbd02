"""Llama and related families from checkpoint to tokens, against their classes in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_config
from checkpoints import write_draft
from drafted_outputs import check_greedy
from llama_checkpoints import HIDDEN, LAYERS, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

BUSHY = DraftShape(draft_top_k=8, draft_depth=3, draft_tokens=48)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "qwen3_moe": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 2}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "shards": 2}),
    "qwen3": ("qwen3", {"shards": 2}),
    "one KV head of 16": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1}),
    "as many KV heads": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "dtype": "float16"}),
    "heads of 64": ("llama", {"head_dim": 64, "rope_parameters": None}),
    "heads of 80": ("llama", {"head_dim": 80, "shards": 3}),
    "linear": ("llama", {"rope_parameters": {
        "rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "yarn": ("qwen3", {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6,
        "original_max_position_embeddings": 64}}),
    "heads of 128": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "biased qwen3": ("qwen3", {"attention_bias": True, "num_hidden_layers": 5}),
    "16 heads on a KV head": ("qwen3_moe", {
        "num_attention_heads": 16, "num_key_value_heads": 1, "dtype": "bfloat16"}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0, 2]}),
    "every expert": ("qwen3_moe", {"num_experts_per_tok": 8, "shards": 2}),
}  # fmt: skip


def built(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """Write a checkpoint and a random draft for it, and build their engine."""
    write_llama(folder / "model", kind, **changes)
    write_draft(
        folder / "draft", target_layers=changes.get("num_hidden_layers", LAYERS),
        target_hidden=HIDDEN, target_vocab=VOCAB, hidden=HIDDEN, draft_vocab=24,
        aux_layers=(0,),
    )  # fmt: skip
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128),
    )
    build(options, SilentProgress())


def check(folder: Path) -> None:
    """Assert that every token with the draft, and every stage, equals transformers."""
    check_greedy(folder, BUSHY)
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    assert max(row.max_error for row in report.rows) < 1e-4
    assert report.passed


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_stage_equals_transformers(tmp_path: Path, case: str) -> None:
    built(tmp_path, *CASES[case])
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_other_sizes(tmp_path: Path, case: str) -> None:
    built(tmp_path, *MORE[case])
    check(tmp_path)


def test_yarn_extends_beyond_max_position_embeddings(tmp_path: Path) -> None:
    """Use Qwen's recipe for long contexts, which does not change ``max_position_embeddings``.

    Compare tokens and log-probabilities at positions 64 to 255.
    """
    import torch
    from transformers import AutoModelForCausalLM

    write_llama(tmp_path / "model", "qwen3", max_position_embeddings=64)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit_config(tmp_path / "model", rope_parameters=None, rope_theta=1e4, rope_scaling=rope)
    options = BuildOptions(
        model=tmp_path / "model",
        output=tmp_path / "engine",
        limits=LimitOptions(max_seq_len=256),
    )
    build(options, SilentProgress())
    prompt = Prompt(id="long", prompt_ids=tuple(3 + (7 * i) % 29 for i in range(100)))
    params = GenerateParams(max_new_tokens=156, ignore_eos=True)
    events = list(Engine.load(tmp_path / "engine").generate([prompt], params))
    (record,) = [event.record for event in events if isinstance(event, FinishEvent)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.tensor(prompt.prompt_ids + record.output_ids)
    assert len(ids) == 256
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, 99:-1]
    assert record.output_ids == tuple(logits.argmax(-1).tolist())
    chosen = logits.log_softmax(-1).gather(1, ids[100:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(record.logprobs), chosen, rtol=0, atol=1e-4)
