"""The example's recall task: documents that repeat earlier definitions, and training on them."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from script_modules import script_modules
from tokenizers import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
SCRIPTS = ("geometry", "model", "muon", "export", "recall_text", "train_target", "judge_recall")
LENGTH = 64


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The example's scripts as modules, removed from ``sys.modules`` afterwards."""
    with script_modules(EXAMPLE, *SCRIPTS) as modules:
        yield SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EXAMPLE / "target" / "tokenizer.json"))


@pytest.mark.parametrize("ends_at", [1.0, 0.4])
def test_questions_of_documents_have_a_defined_answer(
    scripts: Any, tokenizer: Tokenizer, ends_at: float
) -> None:
    rng = random.Random(7)
    filler = [rng.randrange(10, 4000) for _ in range(3000)]
    recall_document = scripts.recall_text.document(
        rng, tokenizer, filler, length=1200, count=12, ends_at=ends_at
    )
    assert len(recall_document.ids) == len(recall_document.undefined) == 1200
    assert len(recall_document.spans) == 2 * 12
    distances = [span.distance for span in recall_document.spans]
    assert min(distances) < 250 and max(distances) > 800 * ends_at
    for span in recall_document.spans:
        there = slice(span.start - span.distance, span.stop - span.distance)
        question = tokenizer.decode(recall_document.ids[span.start : span.stop]).strip()
        assert question.isdigit() if span.kind == "value" else question.strip("_").count("_") == 1
        # Other preceding text may split a number into other tokens.
        assert tokenizer.decode(recall_document.ids[there]).strip()[:3] == question[:3]
        # Without definitions, the question is equal and its answer does not occur before it.
        assert (
            recall_document.undefined[span.start : span.stop]
            == recall_document.ids[span.start : span.stop]
        )
        before = tokenizer.decode(recall_document.undefined[: span.start])
        assert question not in before or span.kind == "name"
        assert recall_document.undefined[there] != recall_document.ids[there]


def tiny(scripts: Any) -> Any:
    return scripts.geometry.Geometry(hidden=64, layers=2, head_dim=16, experts=4, window=32)


def arguments(corpus: Path, output: Path, **changes: Any) -> argparse.Namespace:
    usual = {
        "corpus": corpus,
        "output": output,
        "device": "cpu",
        "time_limit_s": 1e9,
        "steps": 6,
        "seed": 3,
        "log_every": 2,
        "evaluate_every_s": 1e9,
        "held_out_sequences": 1,
        "initial": None,
        "recall": corpus / "recall.npy",
        "save_every_s": 1e9,
        "resume": False,
    }
    return argparse.Namespace(**{**usual, **changes})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two alternating tokens, and rows to recall with other tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    random_ids = np.random.default_rng(4)
    for name, tokens in (("train", 4000), ("held_out", 300)):
        ids = random_ids.integers(10, 12, tokens).astype(np.uint16)
        ids[199::200] = 0
        np.save(folder / f"{name}.npy", ids)
    np.save(folder / "recall.npy", random_ids.integers(20, 30, (40, LENGTH + 1)).astype(np.uint16))
    (folder / "corpus.json").write_text('{"held_out": {"tokens": 300, "bytes": 900}}')
    return folder


def recipe(scripts: Any) -> Any:
    module = scripts.train_target
    sizes = {"tokens_per_step": 4 * LENGTH, "short_length": LENGTH, "long_length": LENGTH}
    return module.replace(module.CONTINUED, **sizes)


def test_batches_mix_corpus_and_recall(scripts: Any, corpus: Path, tmp_path: Path) -> None:
    trainer = scripts.train_target.Trainer(
        arguments(corpus, tmp_path), recipe(scripts), tiny(scripts)
    )
    rows = torch.cat(trainer.batches(LENGTH))
    recalled = (rows >= 20).all(1)
    assert ((rows >= 20).any(1) == recalled).all()
    assert 0.3 < recalled.float().mean() < 0.4
    shorter = torch.cat(trainer.batches(LENGTH // 2))
    assert shorter.max() < 20


def test_resumed_training_has_equal_bits(scripts: Any, corpus: Path, tmp_path: Path) -> None:
    """Continue from a written model; the run is stopped after half of the steps, or not."""
    train, geometry = scripts.train_target, tiny(scripts)
    torch.manual_seed(1)
    first = scripts.model.Target(geometry)
    scripts.export.save_target(first, tmp_path / "first")
    stored = scripts.export.load_target(tmp_path / "first", geometry)

    def trainer(name: str, **changes: Any) -> Any:
        args = arguments(corpus, tmp_path / name, initial=tmp_path / "first", **changes)
        return train.Trainer(args, recipe(scripts), geometry)

    whole = trainer("whole")
    for result, expected in zip(whole.model.parameters(), stored.parameters(), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    whole.run()

    half = trainer("half", save_every_s=0.0)
    save = half.save

    def save_and_stop() -> None:
        save()
        if half.step == 3:
            raise KeyboardInterrupt

    half.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        half.run()
    rest = trainer("half", resume=True)
    rest.run()
    assert rest.step == whole.step == 6
    assert [e["train"] for e in rest.log] == [e["train"] for e in whole.log]
    for result, expected in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    rest.finish()
    assert sorted(p.name for p in (tmp_path / "half").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "training_log.json",
    ]  # fmt: skip


def test_recall_is_measured_at_answers_only(scripts: Any, tokenizer: Tokenizer) -> None:
    """A model that repeats the token a fixed distance before is right there, and nowhere else."""
    judge, geometry = scripts.judge_recall, tiny(scripts)
    rng = random.Random(2)
    filler = [rng.randrange(10, 4000) for _ in range(900)]
    recall_document = scripts.recall_text.document(rng, tokenizer, filler, length=401, count=6)
    known = next(s for s in recall_document.spans if s.kind == "value")

    class Repeating(scripts.model.Target):
        def states(self, ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
            follow = torch.roll(ids, known.distance - 1, 1)
            return self.embedding[follow], None

    torch.manual_seed(0)
    model = Repeating(geometry)
    with torch.no_grad():
        model.head.copy_(model.embedding)
    defined, undefined = judge.recalled(model, recall_document, None)
    at = recall_document.spans.index(known)
    assert defined[at].right == 1.0 and defined[at].loss < 0.1
    assert undefined[at].right < 1.0 and undefined[at].loss > 1
    pairs = list(zip(defined, undefined, strict=True))
    rows = list(judge.table(pairs))
    assert sum(row["spans"] for row in rows) == len(recall_document.spans)
