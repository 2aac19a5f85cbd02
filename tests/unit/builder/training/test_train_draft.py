"""``train_draft`` from text to files, on a tiny random target."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_target
from draft_training import make_options
from safetensors.torch import load_file

from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training import training_loop
from specbuild.builder.training.config import SelfText
from specbuild.builder.training.draft import train_draft
from specbuild.builder.training.frozen_target import FrozenTarget, load_target
from specbuild.builder.training.schedule import FINAL_RATE, LearningRateSchedule
from specbuild.runtime.errors import SpecbuildError

VOCAB = 64


@pytest.fixture(scope="module")
def trained(model, text, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "draft"
    own = SelfText(count=6, prompt_tokens=8)
    return train_draft(make_options(model, text, output, self_text=own), SilentProgress()), output


def test_loss_falls_at_every_position(trained):
    report, _ = trained
    first, last = report.losses[0], report.losses[-1]
    assert (report.finished, report.steps, last.step) == (True, 40, 40)
    assert last.total < 0.9 * first.total
    assert all(b < a for a, b in zip(first.per_position, last.per_position, strict=True))


def test_the_report_measures_held_out_and_generated_text(trained):
    report, output = trained
    for acceptance in (report.held_out_text, report.held_out_self_text):
        assert len(acceptance.agreement) == 3
        assert 1.0 <= acceptance.mean_acceptance_length <= 1 + acceptance.chain
    assert report.self_text_rows == 6
    written = (output / "training_report.json").read_text()
    assert json.loads(written)["held_out_text"]["agreement"] == list(report.held_out_text.agreement)
    assert str(output.parent) not in written
    assert (output / "training_losses.svg").read_text().startswith("<?xml")


def test_the_files_are_a_valid_draft_of_the_target(trained, model):
    _, output = trained
    target = read_target(model, strict=True).geometry
    checkpoint = read_draft(output, target, strict=True)
    geometry = checkpoint.geometry
    assert (geometry.vocab, geometry.inner, geometry.aux_layers) == (48, 32, (0, 1, 1))
    assert (geometry.rope.theta, geometry.rope.scaling) == (10000.0, None)
    assert geometry.own_head and not geometry.own_embedding
    stored = load_file(output / "model.safetensors")
    assert stored["t2d"].sum() == 48
    assert stored["fc.weight"].dtype == torch.bfloat16
    ids = torch.arange(48) + stored["d2t"]
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids)
    assert sorted(p.name for p in output.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training_losses.svg",
        "training_report.json",
    ]
    assert not output.with_name("draft.training").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(model, text, tmp_path, monkeypatch):
    whole = make_options(model, text, tmp_path / "whole", steps=12, save_every=5)
    train_draft(whole, SilentProgress())
    parts = replace(whole, output=tmp_path / "parts", time_limit_s=100.0)
    clock = iter([0.0] * 8 + [1000.0] * 100)
    with monkeypatch.context() as patched:
        patched.setattr(training_loop.time, "monotonic", lambda: next(clock))
        stopped = train_draft(parts, SilentProgress())
    assert not stopped.finished and 0 < stopped.steps < 12
    assert not parts.output.exists()
    with pytest.raises(SpecbuildError, match="unfinished run"):
        train_draft(parts, SilentProgress())
    with pytest.raises(SpecbuildError, match="other options"):
        train_draft(replace(parts, resume=True, learning_rate=1e-3), SilentProgress())
    report = train_draft(replace(parts, resume=True, time_limit_s=None), SilentProgress())
    assert report.finished
    for name in ("config.json", "model.safetensors", "training_report.json"):
        assert (whole.output / name).read_bytes() == (parts.output / name).read_bytes(), name


def test_half_precision_target_and_autocast(model, text, tmp_path):
    options = make_options(model, text, tmp_path / "d", dtype="bfloat16")
    report = train_draft(options, SilentProgress())
    assert report.losses[-1].total < 0.9 * report.losses[0].total


def test_a_rejected_run_leaves_no_files(model, text, tmp_path):
    with pytest.raises(SpecbuildError, match="draft_vocab is 65"):
        train_draft(make_options(model, text, tmp_path / "d", draft_vocab=65), SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_not_replaced(model, text, tmp_path):
    with pytest.raises(SpecbuildError, match="the output exists"):
        train_draft(make_options(model, text, tmp_path), SilentProgress())


def test_divergence_is_an_error(model, text, tmp_path):
    wild = make_options(model, text, tmp_path / "d", learning_rate=1e30, steps=20)
    with pytest.raises(SpecbuildError, match="lower learning_rate"):
        train_draft(wild, SilentProgress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"sequence_length": 7}, "sequence_length is 7"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"self_text": SelfText(count=1, prompt_tokens=23)}, "prompt_tokens is 23"),
    ],
)
def test_reports_invalid_training_options_in_one_line(model, text, tmp_path, changes, message):
    with pytest.raises(SpecbuildError, match=message):
        make_options(model, text, tmp_path / "d", **changes)


def test_aux_layers_are_layer_outputs_before_the_final_norm(model):
    """Compare with transformers' list of hidden states, whose last entry is normed."""
    loaded = load_target(model)
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    teacher = FrozenTarget(loaded, (0, 1)).teach(ids)
    expected = loaded(ids, output_hidden_states=True)
    low, high = teacher.aux_hidden.chunk(2, dim=-1)
    torch.testing.assert_close(low, expected.hidden_states[1])
    torch.testing.assert_close(loaded.model.norm(high), expected.hidden_states[2])
    torch.testing.assert_close(teacher.logits, expected.logits)


@pytest.mark.parametrize("experts_format", ["mxfp4", "bf16"])
def test_dense_experts_equal_the_eager_loop(tmp_path, experts_format):
    write_target(tmp_path / "t", experts_format=experts_format, vocab=VOCAB)
    loaded = load_target(tmp_path / "t")
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    dense = loaded(ids).logits
    loaded.set_experts_implementation("eager")
    torch.testing.assert_close(dense, loaded(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_cosine_starts_where_the_warm_up_ends():
    rates = [LearningRateSchedule(100, 1.0, 0.2).rate(step) for step in range(101)]
    assert rates[19] == rates[20] == 1.0
    assert rates[60] == pytest.approx((1 + FINAL_RATE) / 2)
    assert rates[100] == pytest.approx(FINAL_RATE)


def test_a_resumed_run_has_the_losses_of_its_unfinished_interval():
    def run():
        draft = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(draft.parameters())
        return training_loop.TrainingRun(
            SimpleNamespace(device="cpu"), draft, optimizer, *[None] * 4
        )

    first, again = run(), run()
    first.step, first.recent = 3, [torch.tensor([1.0, 2.0])]
    training_loop.restore(again, training_loop._state(first))
    assert again.step == 3 and [r.tolist() for r in again.recent] == [[1.0, 2.0]]
