"""Ragged steps with a real plan. The interpreter replaces the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_pair
from llama_checkpoints import write_llama
from plan_host import PlanHost, lowered_engine, step_name
from qwen_predictors import add_qwen_predictor
from rank_host import RankHost

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ADJUSTS, level_section

DEPTH, TOKENS, LENGTHS = 3, 24, (21, 37, 5, 12)
CHAIN = DraftShape(1, DEPTH, DEPTH)
RAGGED = f"{step_name(4, CHAIN)}.rows-12"


@pytest.fixture(scope="module", params=["one GPU", "two GPUs", "recurrent states"])
def lowered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoweredEngine:
    """Return the programs of a random GPT-OSS with its draft, or Qwen3.5 with its MTP layer."""
    path = tmp_path_factory.mktemp("checkpoints")
    sizes: dict[str, Any] = {
        "max_seq_len": 128, "max_batch_size": 4, "page_size": 16,
        "draft_top_k": 1, "draft_depth": DEPTH, "draft_tokens": DEPTH,
    }  # fmt: skip
    if request.param == "recurrent states":
        write_llama(
            path / "target", "qwen3_5_text", num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
            linear_value_head_dim=16,
        )  # fmt: skip
        add_qwen_predictor(path / "target", like=1)
        return lowered_engine(path / "target", Path("mtp"), **sizes)
    write_pair(path)
    ranks = 2 if request.param == "two GPUs" else 1
    return lowered_engine(path / "target", path / "draft", tensor_parallel=ranks, **sizes)


def admitted(lowered: LoweredEngine, temperature: float) -> tuple[PlanHost, list[list[int]]]:
    """Return four prompts with their first tokens. The third has a small token limit."""
    host = (RankHost if lowered.engine_sizes.ranks > 1 else PlanHost)(lowered)
    host.port("ignore_eos").fill_(1)
    vocab = host.port("score.logits").shape[1]
    random, outputs = np.random.default_rng(8), []
    for row, length in enumerate(LENGTHS):
        ids = random.integers(0, vocab, length).tolist()
        budget = 9 if row == 2 else TOKENS
        first, _ = host.admit(row, ids, budget, temperature=temperature, seed=row)
        outputs.append([first])
    return host, outputs


def penalise(host: PlanHost) -> None:
    """Let the logits of the second and fourth sequence depend on their outputs."""
    host.port("repetition").fill_(1.0)
    host.port("marks").zero_()
    for row in (1, 3):
        host.port("changes")[row], host.port("presence")[row] = ADJUSTS, 3.0


@pytest.mark.parametrize("penalties", [False, True], ids=["plain", "penalties"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_of_chains_are_verified(
    lowered: LoweredEngine, temperature: float, penalties: bool
) -> None:
    """With any number of rows per sequence the tokens equal those without a draft."""
    host, expected = admitted(lowered, temperature)
    if penalties:
        penalise(host)
    for _ in range(TOKENS - 1):
        for row, step in enumerate(host.step(step_name(4, full_logits=penalties))):
            expected[row] += step.tokens
    host, outputs = admitted(lowered, temperature)
    if penalties:
        penalise(host)
    random, accepted, turns = np.random.default_rng(5), 0, 0
    while not host.port("done").all():
        counts = random.integers(1, DEPTH + 2, 4)
        while counts.sum() > 12:
            counts[counts.argmax()] -= 1
        host.port("row_counts").copy_(torch.from_numpy(counts.astype(np.int32)))
        for row, step in enumerate(host.step(RAGGED + ".logits" * penalties)):
            assert len(step.tokens) <= counts[row]
            assert step.accepted < counts[row]
            outputs[row] += step.tokens
            accepted += step.accepted
        turns += 1
    assert outputs == expected
    assert [len(tokens) for tokens in outputs] == [TOKENS, TOKENS, 9, TOKENS]
    # A draft of random weights is right where it has the target's noise.
    assert turns < TOKENS and (accepted > 0 or temperature == 0)
    assert not penalties or len(set(outputs[1])) > TOKENS // 2


def test_equal_parts_have_the_bits_of_a_step_that_is_not_ragged(lowered: LoweredEngine) -> None:
    """Two levels of every chain of three, against chains of two: tokens, the target's caches."""
    ragged, equal = (admitted(lowered, 1.0)[0] for _ in range(2))
    ragged.port("row_counts").fill_(3)
    accepted = 0
    for _ in range(6):
        parts = ragged.step(RAGGED)
        assert parts == equal.step(step_name(4, DraftShape(1, 2, 2)))
        accepted += sum(step.accepted for step in parts)
        for group in lowered.engine_sizes.layer_groups:
            name = f"cache:{group.name}"
            found, expected = (host.memory.buffer(name) for host in (ragged, equal))
            assert torch.equal(found, expected), name
    assert accepted > 0


def test_the_target_has_the_rows_of_the_name(lowered: LoweredEngine) -> None:
    entries = [e for e, _ in lowered.programs if e.name.startswith(RAGGED)]
    assert [e.full_logits for e in entries] == [False, True]
    for entry in entries:
        assert (entry.rows, entry.is_ragged, entry.draft_depth) == (12, True, DEPTH)
    assert lowered.engine_sizes.ragged_steps


@pytest.mark.parametrize("name", [step_name(4, CHAIN), RAGGED])
def test_a_level_below_the_first_has_one_row_per_sequence(
    lowered: LoweredEngine, name: str
) -> None:
    """The first level ingests up to D + 1 tokens of a sequence; its head has one row of each."""
    program = lowered.writer.program(next(low for e, low in lowered.programs if e.name == name))
    for level in range(1, DEPTH + 1):
        calls = [call for call in program.ops if call.section == level_section(level)]
        rows = {c.inputs["positions"].shape[0] for c in calls if "positions" in c.inputs}
        assert rows - {4} == ({4 * (DEPTH + 1)} if level == 1 else set())
        assert [c.inputs["logits"].shape[0] for c in calls if c.op == "TreeExpand"] == [4]
