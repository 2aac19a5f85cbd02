"""Engines of small random models of any family, held against their own class in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import write_draft
from drafted_outputs import drafted_outputs
from llama_checkpoints import HIDDEN, LAYERS, OF_KIND, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.verify import verify_engine
from specbuild.runtime.engine_dir.manifest import DraftShape

BUSHY = DraftShape(draft_top_k=8, draft_depth=3, draft_tokens=48)
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
PROMPTS = [tuple(range(3, 3 + count)) for count in (1, 5, 21)]
NEW_TOKENS = 96


def build_drafted(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """A checkpoint of this model type, a random EAGLE3 draft for it, and their engine."""
    write_llama(folder / "model", kind, **changes)
    build_drafted_engine(folder, OF_KIND[kind] | changes)


def build_drafted_engine(folder: Path, changes: dict[str, Any]) -> None:
    """A random EAGLE3 draft for the checkpoint of these sizes, and their engine."""
    write_draft(
        folder / "draft", target_layers=changes.get("num_hidden_layers", LAYERS),
        target_hidden=changes.get("hidden_size", HIDDEN), target_vocab=VOCAB,
        hidden=changes.get("hidden_size", HIDDEN), draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    build_engine(folder)


def build_engine(folder: Path) -> None:
    """The engine of a checkpoint and its draft."""
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128),
    )
    build(options, SilentProgress())


def check_tokens(folder: Path) -> None:
    """AssertionError where one of 288 greedy tokens with a tree or a chain of drafts is not the
    best one by transformers, or no drafted token was accepted."""
    model, accepted = load_target(folder / "model", teacher=False), 0
    for shape in (BUSHY, CHAIN):
        outputs, count = drafted_outputs(folder / "engine", PROMPTS, shape, new_tokens=NEW_TOKENS)
        accepted += count
        for ids, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                best = model(torch.tensor([ids + output]), use_cache=False).logits[0].argmax(-1)
            assert output == tuple(best[len(ids) - 1 : -1].tolist())
    assert accepted


def check_stages(folder: Path) -> float:
    """The largest difference of a stage or logit of the engine, fp32, from transformers'.

    AssertionError where it is 2e-4 or more, or where drafts change what is decoded.
    """
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    largest = max(row.max_error for row in report.rows)
    assert largest < 2e-4
    assert report.passed
    assert len(report.losslessness) == 5
    return largest
