"""The benchmarks of SpecPV's quality: reading in chunks, and sums over runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from script_modules import BENCHMARKS, script_modules
from torch.nn import functional as F

from specbuild.cli.bench.runs import Run
from specbuild.runtime.records import RunRecord, RunStats, SpecPvStats

START, LENGTH, ROWS = 60, 132, 12


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with script_modules(BENCHMARKS, "specpv_quality", "specpv_decoding") as modules:
        yield modules


@pytest.fixture(scope="module")
def model() -> Any:
    """A GPT-OSS of four layers in transformers, with large attention outputs."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(3)
    config = GptOssConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=16, num_local_experts=2, num_experts_per_tok=2,
        vocab_size=64, sliding_window=16, max_position_embeddings=256, initializer_range=0.3,
        attn_implementation="eager",
    )  # fmt: skip
    return GptOssForCausalLM(config).float().eval()


def view(script: ModuleType, budget: int) -> Any:
    return script.View(budget, block=4, sink=1, window=2, rows=ROWS, asking=3)


def test_chunks_equal_one_forward(scripts: dict[str, ModuleType], model: Any) -> None:
    """Losses equal those of one forward.

    A view of everything changes nothing, a small view does.
    """
    script = scripts["specpv_quality"]
    ids = torch.randint(0, 64, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))
    views = [view(script, 2), view(script, 99)]
    result = list(script.Reader(model, views).pieces(ids, START))
    with torch.inference_mode():
        whole = model(ids[None, :-1]).logits[0].float()
    losses = F.cross_entropy(whole, ids[1:], reduction="none")
    assert [p.context for v, p in result if v is views[0]] == list(range(START, LENGTH, ROWS))
    for chosen, piece in result:
        expected = losses[piece.context : piece.context + ROWS].mean()
        assert piece.loss_whole == pytest.approx(float(expected), abs=1e-4)
        assert piece.blocks == (piece.context - 4) // 4 - 2
        if chosen is views[1]:
            assert (piece.same, piece.divergence) == (1.0, pytest.approx(0, abs=1e-6))
            assert piece.sink == pytest.approx(piece.sink_whole)
        else:
            assert piece.divergence > 1e-3
            assert piece.sink > piece.sink_whole


def test_errors_are_computed_over_means_of_chunks(scripts: dict[str, ModuleType]) -> None:
    script = scripts["specpv_quality"]
    random = np.random.default_rng(2)
    numbers = random.random((30, 3))
    pieces = [
        script.Piece(100, 9, same, 0.1, loss, loss + added, 0.5, 0.6)
        for same, loss, added in numbers
    ]
    row = script.summary(view(script, 5), 64, 128, pieces)
    assert row["positions"] == 30 * ROWS
    assert row["same"] == pytest.approx(numbers[:, 0].mean())
    assert row["same_error"] == pytest.approx(numbers[:, 0].std(ddof=1) / 30**0.5)
    assert row["loss_added_error"] == pytest.approx(numbers[:, 2].std(ddof=1) / 30**0.5)
    assert f"{row['same']:.2%}" in script.line(row)


def record(acceptance: float, rechecked: int, agreed: int) -> RunRecord:
    specpv = SpecPvStats(4, 9, 2, rechecked, agreed, None, 0, ())
    stats = RunStats(100, 40, 20, acceptance, (), (), 0.1, 0.01, 90.0, specpv=specpv)
    return RunRecord("0", (), (), None, "length", stats)


def run(seconds: float, *records: RunRecord) -> Run:
    return Run(records, 2 * seconds, seconds, decode_tokens=100 * len(records))


def test_results_sum_tokens_and_average_prompts(scripts: dict[str, ModuleType]) -> None:
    script = scripts["specpv_decoding"]
    request = script.Setting(1024, 4)
    together = run(2.0, record(2.0, 10, 9), record(3.0, 30, 30))
    row = script.summary(request, [together, run(0.5, record(4.0, 0, 0))])
    assert (row["rechecked_tokens"], row["agreement"]) == (40, 39 / 40)
    assert row["acceptance_length"] == 3.0
    assert row["acceptance_length_error"] == pytest.approx(1 / 3**0.5)
    assert row["agreement_error"] == pytest.approx(0.05)
    assert row["tokens_per_s"] == pytest.approx((100.0 + 200.0) / 2)
    none = script.summary(request, [run(1.0, record(2.0, 0, 0))])
    assert none["agreement"] is None and "–" in script.line(none)
