"""A draft trained on a model with recurrent states, from text to an engine that drafts with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import Tensors, edit_tensors
from llama_checkpoints import VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import SelfText, TrainOptions
from specbuild.builder.training.draft import train_draft
from specbuild.builder.training.output import TrainReport
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

CHAIN, TREE = DraftShape(1, 3, 3), DraftShape(4, 3, 12)
BATCH, TOKENS = 8, 80


@dataclass(frozen=True)
class Trained:
    """A draft's training report, and the engine of its target, with few pages."""

    report: TrainReport
    engine: Path


def sharpen(tensors: Tensors) -> None:
    """Make the next token depend mostly on the last one, so that few steps teach it."""
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensors[name] = 0.3 * tensor
        elif name == "lm_head.weight":
            tensors[name] = 6 * tensor


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A small random Qwen3.5, and a draft that was trained on the target's own continuations."""
    folder = tmp_path_factory.mktemp("hybrid-draft")
    write_llama(folder / "model", "qwen3_5_text")
    edit_tensors(folder / "model", sharpen)
    ids = np.random.default_rng(0).integers(2, VOCAB, (60, 40))
    lines = [json.dumps({"ids": row.tolist()}) for row in ids]
    (folder / "ids.jsonl").write_text("\n".join(lines))
    report = train_draft(
        TrainOptions(
            model=folder / "model", texts=(folder / "ids.jsonl",), output=folder / "draft",
            steps=120, batch_size=4, sequence_length=32, learning_rate=5e-3, ttt_steps=2,
            draft_vocab=VOCAB - 2, inner=64, held_out_fraction=0.1, held_out_rows=8,
            self_text=SelfText(count=40, prompt_tokens=4), seed=1,
        ),
        SilentProgress(),
    )  # fmt: skip
    options = BuildOptions.from_flat(
        model=folder / "model", draft=folder / "draft", output=folder / "engine", max_seq_len=128,
        max_batch_size=BATCH, kv_pages=18, draft_top_k=TREE.draft_top_k,
        draft_depth=TREE.draft_depth, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    build(options, SilentProgress())
    return Trained(report, options.output)


def records_of(
    engine: Engine, count: int, shape: DraftShape | None, seed: int = 7
) -> list[RunRecord]:
    """Return the records of prompts of 1 to 40 tokens; every second request samples."""
    drawn = np.random.default_rng(seed)
    prompts, params = [], []
    for i in range(count):
        ids = tuple(int(x) for x in drawn.integers(2, VOCAB, 1 + 7 * i % 40))
        prompts.append(Prompt(str(i), prompt_ids=ids))
        sampling = SamplingParams(temperature=0.8 * (i % 2), seed=i)
        params.append(GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, sampling=sampling))
    events = engine.generate(prompts, params, speculation=shape)
    finished = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [finished[i] for i in range(count)]


def ids_of(records: Sequence[RunRecord]) -> list[tuple[int, ...]]:
    return [record.output_ids for record in records]


def test_tokens_of_a_trained_draft_are_accepted(trained: Trained) -> None:
    """Training lowers the loss; steps accept over 0.15 draft tokens each; outputs are equal."""
    losses = trained.report.losses
    assert losses[-1].total < 0.9 * losses[0].total
    engine = Engine.load(trained.engine)
    plain = records_of(engine, 12, None)
    for shape in (CHAIN, TREE):
        drafted = records_of(engine, 12, shape)
        assert ids_of(drafted) == ids_of(plain)
        greedy = [record.stats for record in drafted[::2]]
        accepted = sum(sum(i * n for i, n in enumerate(s.acceptance_histogram)) for s in greedy)
        assert accepted > 0.15 * sum(s.steps for s in greedy)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_100_000_tokens_are_equal_with_and_without_drafts(trained: Trained, part: int) -> None:
    """Requests join, leave and are preempted; the test has ten parts."""
    count = 10**4 // TOKENS
    plain = ids_of(records_of(Engine.load(trained.engine), count, None, part))
    assert sum(map(len, plain)) == 10**4
    on_demand = RuntimeSettings(kv_policy="max-utilization")
    for shape in (CHAIN, TREE):
        records = records_of(Engine.load(trained.engine, on_demand), count, shape, part)
        assert ids_of(records) == plain
        assert sum(record.stats.preemptions for record in records) > 0
