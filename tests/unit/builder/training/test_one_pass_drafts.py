"""Training of drafts that draft in one pass, against plain torch run from every row alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_training import make_options
from left_out import slow
from safetensors.torch import load_file

from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.dflash.reference import ReferenceDFlash
from specbuild.builder.families.eagle3.reference import ReferenceDraft
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.dflash_module import DFlashModule
from specbuild.builder.training.draft import train_draft
from specbuild.builder.training.draft_kinds import KINDS
from specbuild.builder.training.draft_layers import (
    DraftLogits,
    DraftShape,
    TokenWeights,
    TrainableDraft,
)
from specbuild.builder.training.frozen_target import TeacherOutputs
from specbuild.builder.training.objective import Batch, Objective
from specbuild.builder.training.p_eagle_module import PEagleModule
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.errors import SpecbuildError

VOCAB, STEPS, LENGTH, MASK = 40, 4, 13, 39
ROWS = LENGTH - STEPS
CONFIG = {
    "num_attention_heads": 4,
    "hidden_size": 16,
    "head_dim": 8,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-5,
    "ptd_token_id": MASK,
}


def shape_of(layers: int) -> DraftShape:
    return DraftShape(
        hidden=16, target_hidden=16, aux_layers=(0, 1, 3), vocab=20, inner=24, q_heads=4,
        kv_heads=2, head_dim=8, rope_theta=100.0, rms_eps=1e-5, layers=layers,
    )  # fmt: skip


def drawn(draft: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name
            parameter.copy_(noise * (0.3 if norm else parameter.shape[-1] ** -0.5) + norm)
    return draft


def case() -> tuple[Batch, TeacherOutputs, TokenWeights]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=random)
    counted = torch.rand(2, LENGTH, generator=random) < 0.8
    teacher = TeacherOutputs(
        torch.randn(2, LENGTH, 48, generator=random),
        3 * torch.randn(2, LENGTH, VOCAB, generator=random),
    )
    token_weights = TokenWeights(*torch.randn(2, VOCAB, 16, generator=random).unbind())
    return Batch(ids, counted), teacher, token_weights


def objective(token_weights: TokenWeights, num_known: int, *, hard: bool = False) -> Objective:
    ids = torch.arange(0, 2 * num_known, 2) if num_known < VOCAB else torch.arange(VOCAB)
    member = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)
    return Objective(STEPS, 0.8, ids, member, token_weights, hard)


def predict(
    draft: TrainableDraft, num_known: int, random: torch.Generator | None
) -> list[DraftLogits]:
    batch, teacher, token_weights = case()
    with torch.no_grad():
        return objective(token_weights, num_known).predict(draft, batch, teacher, random)


@pytest.mark.parametrize("layers", [1, 3])
def test_p_eagle_rows_equal_a_pass_from_each_row_alone(layers: int) -> None:
    draft = drawn(PEagleModule(shape_of(layers), mask_token=MASK, keep=0.6))
    batch, teacher, token_weights = case()
    reference = ReferenceDraft(
        CONFIG, dict(draft.state_dict()), embedding=token_weights.embedding, head=torch.empty(0)
    )
    steps = predict(draft, 20, None)
    assert [len(step.rows) for step in steps] == [ROWS] * STEPS
    masks = reference.mask[1].expand(STEPS - 1, -1)
    for sequence in range(2):
        for t in range(ROWS):
            states = torch.cat([teacher.aux_hidden[sequence, : t + 1], masks])
            ids = torch.cat([batch.ids[sequence, 1 : t + 2], torch.full((STEPS - 1,), MASK)])
            run = reference.run(ids, reference.fuse(states), torch.arange(len(ids)))
            result = torch.stack([step.logits[sequence, t] for step in steps])
            torch.testing.assert_close(result, run.logits[t:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_dflash_blocks_equal_a_block_at_each_row_alone(layers: int, causal: bool) -> None:
    draft = drawn(DFlashModule(shape_of(layers), mask_token=MASK, causal=causal, anchors=5))
    batch, teacher, token_weights = case()
    own = {"block_size": STEPS + 1, "mask_token_id": MASK, "causal_head": causal}
    own["target_layer_ids"] = [0]
    reference = ReferenceDFlash(
        CONFIG | {"dflash_config": own, "num_hidden_layers": layers}, dict(draft.state_dict()),
        embedding=token_weights.embedding, head=token_weights.head,
    )  # fmt: skip
    steps = predict(draft, VOCAB, None)
    for sequence in range(2):
        for t in range(ROWS):
            states = teacher.aux_hidden[sequence, : t + 1]
            expected = reference.logits(states, int(batch.ids[sequence, t + 1]))
            result = torch.stack([step.logits[sequence, t] for step in steps])
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_dropped_rows_do_not_change_others() -> None:
    p_eagle = drawn(PEagleModule(shape_of(2), mask_token=MASK, keep=0.6))
    dflash = drawn(DFlashModule(shape_of(2), mask_token=MASK, causal=False, anchors=5))
    for draft, num_known, counts in ((p_eagle, 20, [9, 5, 3, 2]), (dflash, VOCAB, [5] * 4)):
        whole = predict(draft, num_known, None)
        part = predict(draft, num_known, torch.Generator().manual_seed(4))
        assert [len(step.rows) for step in part] == counts
        for one, other in zip(part, whole, strict=True):
            torch.testing.assert_close(one.logits, other.logits[:, one.rows])


def test_hard_losses_learn_the_best_token_of_the_target() -> None:
    draft = drawn(DFlashModule(shape_of(1), mask_token=MASK, causal=False, anchors=5))
    batch, teacher, token_weights = case()
    with torch.no_grad():
        steps = predict(draft, VOCAB, torch.Generator().manual_seed(4))
        losses = objective(token_weights, VOCAB, hard=True).losses(steps, batch, teacher)
    for step, (rows, logits) in enumerate(steps):
        total = 0.0
        for sequence in range(2):
            for place, t in enumerate(rows.tolist()):
                u = t + 1 + step
                if batch.counted[sequence, u]:
                    best = int(teacher.logits[sequence, u].argmax())
                    total -= float(logits[sequence, place].log_softmax(-1)[best])
        assert float(losses[step]) == pytest.approx(total / (2 * len(rows)), rel=1e-5)


def trained(model: Path, text: Path, output: Path, kind: str, **changes: Any) -> Any:
    changes = {"draft_vocab": 48 if KINDS[kind].own_vocabulary else None} | changes
    options = make_options(model, text, output, kind=kind, layers=2, **changes)
    return train_draft(options, SilentProgress())


@pytest.mark.parametrize("kind", ["p-eagle", "dflash", *slow("jetspec")])
def test_a_trained_draft_can_be_read_as_its_kind(
    model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    report = trained(model, text, tmp_path / "draft", kind)
    first, last = report.losses[0], report.losses[-1]
    assert last.total < 0.9 * first.total
    assert len(report.held_out_text.agreement) == 3
    geometry = read_draft(
        tmp_path / "draft", read_target(model, strict=True).geometry, strict=True
    ).geometry
    assert geometry.layers == 2
    if kind == "p-eagle":
        assert isinstance(geometry, PEagleGeometry) and geometry.vocab == 48
    else:
        assert isinstance(geometry, DFlashGeometry)
        assert (geometry.block_size, geometry.causal) == (4, kind == "jetspec")
    # The text counts from 3 to 52; of the other tokens, the last is used.
    assert geometry.mask_token == 63


@pytest.mark.parametrize("kind", ["p-eagle", *slow("dflash")])
def test_a_resumed_run_equals_an_uninterrupted_one(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from specbuild.builder.training import training_loop

    short = {"steps": 8, "save_every": 3, "anchors": 6}
    trained(model, text, tmp_path / "whole", kind, **short)
    clock = iter([0.0] * 5 + [1000.0] * 100)
    with monkeypatch.context() as patched:
        patched.setattr(training_loop.time, "monotonic", lambda: next(clock))
        stopped = trained(model, text, tmp_path / "parts", kind, **short, time_limit_s=100.0)
    assert not stopped.finished
    trained(model, text, tmp_path / "parts", kind, **short, resume=True)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("whole", "parts")]
    assert configs[0] == configs[1]


def test_training_may_start_from_another_draft(model: Path, text: Path, tmp_path: Path) -> None:
    """The first position of a P-EAGLE draft is an EAGLE3 draft, whose weights it loads."""
    changes = {"ttt_steps": 3, "inner": 32, "draft_vocab": 48}
    options = make_options(model, text, tmp_path / "eagle3", **changes)
    before = train_draft(options, SilentProgress()).held_out_text
    begun = replace(
        options, kind="p-eagle", initial=tmp_path / "eagle3", output=tmp_path / "p-eagle",
        steps=1, learning_rate=1e-9,
    )  # fmt: skip
    report = train_draft(begun, SilentProgress())
    assert report.held_out_text.agreement[0] == pytest.approx(before.agreement[0], abs=0.02)
    stored = [load_file(tmp_path / n / "model.safetensors") for n in ("eagle3", "p-eagle")]
    assert torch.equal(stored[0]["d2t"], stored[1]["d2t"])
    with pytest.raises(SpecbuildError, match="a vocabulary of 48 tokens, expected 40"):
        train_draft(replace(begun, output=tmp_path / "x", draft_vocab=40), SilentProgress())
    other = replace(begun, kind="dflash", output=tmp_path / "y", draft_vocab=None, initial=model)
    with pytest.raises(SpecbuildError, match="has no tensor of this draft's names and shapes"):
        train_draft(other, SilentProgress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle3", "layers": 2}, "an EAGLE3 draft has one"),
        ({"kind": "eagle3", "mask_token": 3}, "has no masked rows"),
        ({"kind": "dflash", "draft_vocab": 9}, "a dflash draft uses the target's vocabulary"),
        ({"kind": "p-eagle", "keep": 1.5}, "keep is 1.5, expected at most 1"),
        ({"kind": "p-eagle", "layers": 0}, "layers is 0, expected 1 or more"),
    ],
)
def test_reports_invalid_training_options_in_one_line(
    model: Path, text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = {"draft_vocab": None} | changes
    with pytest.raises(SpecbuildError, match=message):
        make_options(model, text, tmp_path / "d", **values)


def test_rejects_a_mask_token_beyond_the_vocabulary(
    model: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecbuildError, match="mask_token is 64, expected a token below"):
        trained(model, text, tmp_path / "draft", "p-eagle", mask_token=64)
