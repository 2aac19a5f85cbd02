"""Teachers of families with grouped-query attention: drafts learn from the model's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llama_checkpoints import VOCAB, write_llama

from specbuild.builder.training.frozen_target import FrozenTarget, load_target

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Granite": ("granite", {}),
    "Gemma 3": ("gemma3_text", {}),
    "Gemma 4": ("gemma4_text", {}),
    "Gemma 4 with experts": ("gemma4_text", {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
        "moe_intermediate_size": 24}),
    "GLM-4.5": ("glm4_moe", {}),
    "MiniMax-M2": ("minimax_m2", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {}),
    "Qwen3-Next": ("qwen3_next", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_teacher_has_the_states_and_logits_of_the_model(tmp_path: Path, name: str) -> None:
    kind, changes = KINDS[name]
    write_llama(tmp_path, kind, **changes)
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    plain = load_target(tmp_path, teacher=False)
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        expected = plain(ids, use_cache=False, output_hidden_states=True)
    teaching = FrozenTarget(load_target(tmp_path), (0, 1)).teach(ids)
    torch.testing.assert_close(teaching.logits, expected.logits, rtol=0, atol=2e-4)
    states = torch.cat([expected.hidden_states[1], expected.hidden_states[2]], dim=-1)
    assert teaching.aux_hidden.shape == states.shape
    if len(plain.model.layers) > 2:  # the last of hidden_states is normed
        torch.testing.assert_close(teaching.aux_hidden, states, rtol=0, atol=2e-4)
