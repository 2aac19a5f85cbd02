"""Engines of small random models of any family, compared with their class in transformers."""

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
    """Write a checkpoint of this model type and a random EAGLE3 draft; build the engine."""
    write_llama(folder / "model", kind, **changes)
    build_drafted_engine(folder, OF_KIND[kind] | changes)


def build_drafted_engine(folder: Path, changes: dict[str, Any]) -> None:
    """Write a random EAGLE3 draft for a checkpoint of these sizes; build the engine."""
    write_draft(
        folder / "draft", target_layers=changes.get("num_hidden_layers", LAYERS),
        target_hidden=changes.get("hidden_size", HIDDEN), target_vocab=VOCAB,
        hidden=changes.get("hidden_size", HIDDEN), draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    build_engine(folder)


def build_engine(folder: Path) -> None:
    """Build the engine of a checkpoint and its draft."""
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128),
    )
    build(options, SilentProgress())


def check_tokens(folder: Path) -> None:
    """Compare 288 greedy tokens, drafted by a tree and a chain, with transformers.

    AssertionError if one is not the best token by transformers, or if no draft token was accepted.
    """
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
    """Return the largest difference of a stage or logit, fp32, between engine and transformers.

    AssertionError if it is 2e-4 or more, or if drafts change the output.
    """
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    largest = max(row.max_error for row in report.rows)
    assert largest < 2e-4
    assert report.passed
    assert len(report.losslessness) == 5
    return largest
