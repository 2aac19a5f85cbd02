"""Steps that verify host proposals, with a real plan. The interpreter replaces the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_pair, write_target
from dflash_drafts import write_dflash
from left_out import slow
from llama_checkpoints import write_llama
from p_eagle_drafts import write_p_eagle
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.step.host_proposals import host_proposal_sizes
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import FORCED_ROWS, MASKED_ROW

LONGEST, TOKENS = 10, 40
SUFFIX = {"drafter": "suffix", "suffix_max_tokens": LONGEST}
# The references round differently with the number of rows, unlike the kernels.
NEAR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    write_pair(path)
    return path


def lower(path: Path, draft: Path | None, **options: Any) -> LoweredEngine:
    sizes = {"max_seq_len": 128, "max_batch_size": 2, "page_size": 16}
    return lowered_engine(path / "target", draft, **sizes, **options)


@pytest.fixture(scope="module", params=["attention", "recurrent states"])
def alone(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoweredEngine:
    if request.param == "attention":
        return lower(folder, None, **SUFFIX)
    path = tmp_path_factory.mktemp("hybrid")
    write_llama(
        path / "target", "qwen3_5_text", num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16,
    )  # fmt: skip
    return lower(path, None, **SUFFIX)


@pytest.fixture(scope="module", params=["eagle3", "p-eagle", *slow("dflash")])
def beside(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoweredEngine:
    """A draft of one layer, one of three whose caches attend, and one of the target's states."""
    if request.param == "eagle3":
        return lower(folder, folder / "draft", **SUFFIX)
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "dflash":
        write_target(path / "target", layers=4, head_dim=32)
        write_dflash(path / "draft", dtype=torch.bfloat16)
    else:
        (path / "target").symlink_to(folder / "target")
        sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32, "inner": 64}
        write_p_eagle(path / "draft", target_layers=2, target_hidden=96, layers=3, **sizes)
    return lower(path, path / "draft", **SUFFIX)


def admitted(lowered: LoweredEngine, count: int) -> tuple[PlanHost, list[list[int]]]:
    """Return prompts of 21 and 37 tokens, and the first token of each."""
    host = PlanHost(lowered)
    host.port("ignore_eos").fill_(1)
    vocab = host.port("score.logits").shape[1]
    random, outputs = np.random.default_rng(8), []
    for row, length in enumerate((21, 37)[:count]):
        ids = random.integers(0, vocab, length).tolist()
        outputs.append([host.admit(row, ids, TOKENS)[0]])
    return host, outputs


def offer(host: PlanHost, length: int, chains: list[list[int]]) -> str:
    """Write chains for a step with a mean of ``length`` tokens; return the step's name."""
    batch = len(chains)
    name = f"step@{batch}.offered-{length}"
    if batch > 1:
        rows = batch * (length + 1)
        names = (e.name for e, _ in host.engine.programs if e.rows == rows and e.host_proposal)
        name = next(name for name in names if f".rows-{rows}" in name)
        length = host.entry(name).draft_tokens
    port = host.port("offered").fill_(-1)
    tokens = port[batch : batch * (length + 2)].view(batch, length + 1)
    for row, chain in enumerate(chains):
        port[row] = 1 + len(chain)
        tokens[row, 1 : 1 + len(chain)] = torch.tensor(chain, dtype=torch.int32)
    return name


def plain(lowered: LoweredEngine, count: int) -> list[list[int]]:
    """Return the tokens of steps without a draft."""
    host, outputs = admitted(lowered, count)
    for _ in range(TOKENS - 1):
        for row, step in enumerate(host.step(step_name(count))):
            outputs[row] += step.tokens
    return outputs


@pytest.mark.parametrize("count", [1, 2])
def test_chains_are_accepted_as_far_as_they_are_right(alone: LoweredEngine, count: int) -> None:
    expected = plain(alone, count)
    host, outputs = admitted(alone, count)
    random = np.random.default_rng(3)
    while min(len(o) for o in outputs) < TOKENS:
        sizes = host_proposal_sizes(count, LONGEST, ragged=True)
        most, rows = sizes[int(random.integers(len(sizes)))]
        chains, right, left = [], [], rows - count
        for row in range(count):
            known, length = len(outputs[row]), int(random.integers(0, min(most, left) + 1))
            chain = expected[row][known : known + length]
            left -= len(chain)
            right.append(int(random.integers(0, len(chain) + 1)))
            chains.append([*chain[: right[-1]], *(t + 1 for t in chain[right[-1] :])])
        for row, step in enumerate(host.step(offer(host, rows // count - 1, chains))):
            left = TOKENS - len(outputs[row])
            assert step.accepted == min(right[row], max(left - 1, 0))
            assert len(step.tokens) == min(right[row] + 1, left)
            outputs[row] += step.tokens
    assert outputs == expected


@pytest.fixture(scope="module", params=["guides alone", "suffix decoding"])
def forcing(request: pytest.FixtureRequest, folder: Path) -> LoweredEngine:
    return lower(folder, None, **({} if "alone" in request.param else SUFFIX))


def test_forced_tokens_without_a_drafter_need_few_programs(folder: Path) -> None:
    """Each for some tokens of every sequence; a draft's trees bound them, as they do the caches."""
    programs = lower(folder, None).programs
    chains = [(e.batch, e.draft_tokens, e.rows, e.full_logits) for e, _ in programs
              if e.host_proposal]  # fmt: skip
    assert chains == [(1, 7, 8, True), (2, 6, 8, True)]
    drafted = lower(folder, folder / "draft", draft_top_k=1, draft_depth=3, draft_tokens=3)
    chains = [(e.batch, e.draft_tokens, e.rows) for e, _ in drafted.programs if e.host_proposal]
    assert chains == [(1, 3, 4), (2, 2, 4)]
    assert drafted.engine_sizes.limits.draft_tokens == 3


def test_forced_rows_select_their_chain_and_the_next_row_is_masked(forcing: LoweredEngine) -> None:
    """Beside a sequence whose choice at the root is masked, and with the raw log-probabilities."""
    host, outputs = admitted(forcing, 2)
    vocab = host.port("score.logits").shape[1]
    chain, allowed = [9, 9, 5], [3, vocab - 2]
    is_alone = forcing.engine_sizes.host_drafter is None
    name = offer(host, 3 if is_alone else 7, [chain, []]).removesuffix(".logits")
    name = f"{name}.logits"
    host.port("changes")[:2] = torch.tensor([FORCED_ROWS | MASKED_ROW, MASKED_ROW])
    host.port("forced")[:2] = torch.tensor([len(chain), 0])
    mask = host.port("mask").zero_()
    for row, token in enumerate(allowed):
        mask[row, token // 32] = 1 << token % 32
    forced, masked = host.step(name)
    assert (forced.tokens, forced.accepted) == ([*chain, allowed[0]], 3)
    assert (masked.tokens, masked.accepted) == ([allowed[1]], 0)
    scorer = PlanHost(forcing)
    scorer.give_pages(0)
    ids = np.random.default_rng(8).integers(0, vocab, 21).tolist()
    logits = scorer.score(0, [*ids, outputs[0][0], *chain])[len(ids) :]
    expected = logits.log_softmax(1)[range(4), forced.tokens]
    torch.testing.assert_close(torch.tensor(forced.logprobs), expected, atol=NEAR, rtol=NEAR)


def draft_rows(lowered: LoweredEngine, host: PlanHost, row: int) -> torch.Tensor:
    """Return keys and values of a sequence in a draft's cache.

    Their shape is [2 · layers, positions, heads, width].
    """
    group = next(g for g in lowered.engine_sizes.groups if g.name == "draft")
    pool = host.memory.buffer("cache:draft").view(torch.bfloat16).float()
    pool = pool.view(2 * len(group.layers), -1, group.kv_heads, group.page_size, group.k_width)
    pages = host.port("page_table.draft")[row].long()
    return pool[:, pages].transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_cache_of_the_draft_equals_that_of_drafting(beside: LoweredEngine, count: int) -> None:
    """After long chains, right or wrong in the middle, and after steps of any kind."""
    expected = plain(beside, count)
    steady, drafted = admitted(beside, count)
    while min(len(o) for o in drafted) < TOKENS - 1:
        for row, step in enumerate(steady.step(step_name(count, DraftShape(1, 2, 2)))):
            drafted[row] += step.tokens
    host, outputs = admitted(beside, count)
    capacity = host.port("pending_tokens").shape[1]
    assert capacity < LONGEST
    short = 3 if count == 1 else 1
    kinds = [LONGEST, 7, None, LONGEST, step_name(count, DraftShape(1, 1, 1)), short]
    for turn, kind in enumerate(kinds):
        if kind is None or isinstance(kind, str):
            name = kind or step_name(count)
        else:
            chains = []
            for row in range(count):
                known = len(outputs[row])
                chain = expected[row][known : known + kind]
                right = max(len(chain) - turn, 0)
                chains.append([*chain[:right], *(t + 1 for t in chain[right:])])
            name = offer(host, kind, chains)
        for row, step in enumerate(host.step(name)):
            outputs[row] += step.tokens
    for row, tokens in enumerate(outputs):
        assert tokens == expected[row][: len(tokens)]
        ends = [
            int(h.port("length")[row]) - int(h.port("pending_count")[row]) for h in (host, steady)
        ]
        assert min(ends) > (21, 37)[row] + 2 * LONGEST - 4
        rows = [draft_rows(beside, h, row)[:, : min(ends)] for h in (host, steady)]
        assert rows[0].abs().amin((0, 2, 3)).max() > 0
        torch.testing.assert_close(rows[0], rows[1], atol=NEAR, rtol=NEAR)
