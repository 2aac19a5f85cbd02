"""Plans of models with recurrent states and of Gemma 4, interpreted on the CPU.

The reference is transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft
from llama_checkpoints import HIDDEN, VOCAB, write_llama
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import OFFERED

TREE = DraftShape(3, 3, 7)
PROMPT, TOKENS = 70, 40
# Widths that kernels support, and a shared expert whose width is no multiple of a routed one's.
SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}
# A shared expert that RmsMoe includes.
EQUAL_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
# Of a Gemma 4 with experts and a dense MLP, and of one with shared caches and layer embeddings.
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
GEMMA4_INPUTS = {
    "num_kv_shared_layers": 2, "attention_k_eq_v": False, "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen3_5_text", SIZES),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", SIZES | EXPERTS),
    "qwen3_5_moe_text, experts of one width": ("qwen3_5_moe_text", SIZES | EQUAL_EXPERTS),
    "qwen3_next": ("qwen3_next", SIZES | EXPERTS),
    "gemma4 with experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4 with layer embeddings": ("gemma4_text", GEMMA4_INPUTS),
}
# The error of bf16 in transformers, times a factor, plus a fraction of the largest logit.
FACTOR, ALLOWANCE = 2.0, 0.02


@dataclass(frozen=True)
class Model:
    """A random checkpoint, the programs of its engine, and a prompt."""

    path: Path
    engine: LoweredEngine
    ids: list[int]


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("hybrid")
    kind, sizes = KINDS[request.param]
    write_llama(folder / "model", kind, **sizes)
    write_draft(
        folder / "draft", target_layers=4, target_hidden=HIDDEN, target_vocab=VOCAB, hidden=HIDDEN,
        inner=64, head_dim=16, draft_vocab=32, aux_layers=(0, 1, 3),
    )  # fmt: skip
    engine = lowered_engine(
        folder / "model", folder / "draft", max_seq_len=256, max_batch_size=2, drafter="suffix",
        draft_top_k=TREE.draft_top_k, draft_depth=TREE.draft_depth, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(3)
    yield Model(
        folder / "model", engine, torch.randint(0, VOCAB, (PROMPT,), generator=drawn).tolist()
    )


def logits(path: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the logits [T, V] of transformers."""
    from transformers import AutoModelForCausalLM

    reference_model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        return reference_model(torch.tensor([ids])).logits[0].float()


def host_of(model: Model) -> PlanHost:
    host = PlanHost(model.engine)
    host.port("ignore_eos").fill_(1)
    return host


def test_the_error_of_scores_is_that_of_bf16_in_transformers(model: Model) -> None:
    host = host_of(model)
    host.give_pages(0)
    actual = torch.cat([host.score(0, model.ids[:64]), host.score(0, model.ids[64:], 64)])
    expected = logits(model.path, model.ids, torch.float32)
    in_bf16 = logits(model.path, model.ids, torch.bfloat16)
    error, allowed = (
        (actual - expected).square().mean().sqrt(),
        (in_bf16 - expected).square().mean().sqrt(),
    )
    assert error <= FACTOR * allowed + ALLOWANCE * expected.abs().max()


def test_steps_select_the_best_tokens(model: Model) -> None:
    """Each selected token is the best after the previous ones, except for near ties."""
    host = host_of(model)
    first, _ = host.admit(0, model.ids, TOKENS)
    tokens = [first, *host.generate(0, step_name(1), TOKENS - 1)]
    ids = [*model.ids, *tokens]
    expected = logits(model.path, ids, torch.float32)[PROMPT - 1 : -1]
    in_bf16 = logits(model.path, ids, torch.bfloat16)[PROMPT - 1 : -1]
    near = FACTOR * (in_bf16 - expected).abs().max() + ALLOWANCE * expected.abs().max()
    lost = expected.max(1).values - expected[torch.arange(TOKENS), torch.tensor(tokens)]
    assert lost.max() <= near


def test_drafts_change_no_token(model: Model) -> None:
    """Use chains with 0 to 3 accepted tokens, and trees; near ties may differ.

    Unlike kernels, references round with the number of rows. tests/ops/test_lazy_gated_delta.py
    compares the bits of states.
    """
    plain, chains, trees = host_of(model), host_of(model), host_of(model)
    for host in (plain, chains, trees):
        host.admit(0, model.ids, TOKENS)
    expected = plain.generate(0, step_name(1), TOKENS - 1)
    tokens: list[int] = []
    accepted: set[int] = set()
    while len(tokens) < TOKENS - 1:
        # The right tokens, one of which is replaced by a wrong one.
        proposed = (expected[len(tokens) :] + [0] * 3)[:3]
        wrong = len(tokens) % 4
        proposed = [(t + 1) % VOCAB if i == wrong else t for i, t in enumerate(proposed)]
        chains.port(OFFERED)[: 1 + 4 + 1] = torch.tensor([4, 0, *proposed, 0], dtype=torch.int32)
        step = chains.step("step@1.offered-3")[0]
        accepted.add(step.accepted)
        tokens += step.tokens
        if tokens != expected[: len(tokens)]:
            break
    assert len(accepted) > 2
    check_but_for_near_ties(model, expected, tokens[: len(expected)])
    check_but_for_near_ties(model, expected, trees.generate(0, step_name(1, TREE), TOKENS - 1))


def check_but_for_near_ties(model: Model, expected: list[int], tokens: list[int]) -> None:
    """Assert that outputs differ only after two tokens of nearly equal probability."""
    pairs = enumerate(zip(expected, tokens, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), None)
    if same is None:
        return
    first, _ = host_of(model).admit(0, model.ids, TOKENS)
    ids = [*model.ids, first, *expected[:same]]
    last, in_bf16 = (logits(model.path, ids, t)[-1] for t in (torch.float32, torch.bfloat16))
    near = FACTOR * (in_bf16 - last).abs().max() + ALLOWANCE * last.abs().max()
    assert (last[expected[same]] - last[tokens[same]]).abs() <= near


def test_sequences_do_not_change_each_other(model: Model) -> None:
    """A sequence that joins or leaves changes no token of another."""
    alone, together = host_of(model), host_of(model)
    alone.admit(0, model.ids, TOKENS)
    expected = alone.generate(0, step_name(2), 12)
    together.admit(0, model.ids, TOKENS)
    tokens = together.step(step_name(2))[0].tokens
    together.admit(1, model.ids[:9], 6)
    while len(tokens) < 12:
        tokens += together.step(step_name(2))[0].tokens
    assert int(together.port("done")[1]) == 1
    assert tokens == expected
