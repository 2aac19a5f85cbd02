"""Families with grouped-query attention from checkpoint to tokens, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_engines import build_drafted, check_stages, check_tokens

QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a window": ("mistral", {"sliding_window": 12, "tie_word_embeddings": True}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "SmolLM3": ("smollm3", {"tie_word_embeddings": True}),
    "Phi-4": ("phi3", {"num_hidden_layers": 2}),
    "OLMo 3": ("olmo3", {}),
    "Granite": ("granite", {}),
}
SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM3 with windows where it does not turn": ("smollm3", {
        "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 0],
        "num_hidden_layers": 3}),
    "Phi-3 with a window, a part of each head turns": ("phi3", {
        "sliding_window": 9, "shards": 2, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "partial_rotary_factor": 0.75}}),
    "OLMo 2": ("olmo2", {"dtype": "bfloat16", "attention_bias": True}),
    "OLMo 3 without scaling": ("olmo3", {"rope_parameters": None, "num_hidden_layers": 5}),
    "Granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("mistral", {"dtype": "bfloat16", "shards": 2}),
    "Mistral of its default head size": ("mistral", {"head_dim": None}),
    "Ministral 3 without growth": ("ministral3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.0}}),
    "Mixtral with a window": ("mixtral", {"sliding_window": 9, "dtype": "bfloat16"}),
    "Qwen2 with windows in its last layers": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "Qwen3 with windows": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", QUICK)
def test_every_token_and_stage_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    build_drafted(tmp_path, *QUICK[case])
    check_tokens(tmp_path)
    check_stages(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_other_sizes(tmp_path: Path, case: str) -> None:
    build_drafted(tmp_path, *SLOW[case])
    check_tokens(tmp_path)
    check_stages(tmp_path)
