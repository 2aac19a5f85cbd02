"""LK losses against rejection sampling counted token by token, and closed-form gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draft_training import make_options
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import slow

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import LkLoss
from specbuild.builder.training.draft import train_draft
from specbuild.builder.training.draft_layers import DraftLogits, TokenWeights
from specbuild.builder.training.frozen_target import TeacherOutputs
from specbuild.builder.training.lk_loss import lk_losses
from specbuild.builder.training.objective import Batch, Objective
from specbuild.runtime.errors import SpecbuildError

ALPHA, LAMBDA = LkLoss(lk_loss_type="alpha"), LkLoss(lk_loss_type="lambda")
VOCAB, STEPS, LENGTH = 11, 2, 9
ROWS = LENGTH - STEPS
NO_WORDS = TokenWeights(torch.empty(0), torch.empty(0))


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def accepted(p: np.ndarray, q: np.ndarray) -> float:
    """Return the acceptance of rejection sampling of q for p (arXiv 2211.17192)."""
    return sum(qx * min(1.0, px / qx) for px, qx in zip(p, q, strict=True) if qx > 0)


def case(ids: torch.Tensor, seed: int = 0) -> tuple[list[DraftLogits], Batch, TeacherOutputs]:
    random = torch.Generator().manual_seed(seed)
    batch = Batch(
        ids=torch.randint(0, VOCAB, (2, LENGTH), generator=random),
        counted=torch.rand(2, LENGTH, generator=random) < 0.8,
    )
    logits = 2 * torch.randn(2, LENGTH, VOCAB, generator=random)
    predictions = [
        DraftLogits(torch.arange(ROWS), 2 * torch.randn(2, ROWS, len(ids), generator=random))
        for _ in range(STEPS)
    ]
    return predictions, batch, TeacherOutputs(torch.empty(2, LENGTH, 0), logits)


def objective(ids: torch.Tensor, lk: LkLoss | None, *, hard: bool = False) -> Objective:
    in_draft = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)
    return Objective(STEPS, 0.8, ids, in_draft, NO_WORDS, hard, lk)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("lk_loss", [ALPHA, LAMBDA, replace(LAMBDA, kl_scale=0.6, kl_decay=1.0)])
@pytest.mark.parametrize("size", [VOCAB, 6])
def test_losses_equal_counting_token_by_token(size: int, lk_loss: LkLoss, hard: bool):
    ids = torch.arange(VOCAB)[:: VOCAB // size][:size]
    predictions, batch, teacher = case(ids)
    losses = objective(ids, lk_loss, hard=hard).losses(predictions, batch, teacher)
    for step in range(STEPS):
        found = []
        for sequence, row in np.ndindex(2, ROWS):
            at = row + 1 + step
            p = softmax(teacher.logits[sequence, at].double().numpy())
            if int(p.argmax()) not in ids.tolist() or not batch.counted[sequence, at]:
                continue
            q = np.zeros(VOCAB)
            q[ids] = softmax(predictions[step].logits[sequence, row].double().numpy())
            inside = p[ids] / p[ids].sum()
            kl = sum(a * math.log(a / b) for a, b in zip(inside, q[ids], strict=True))
            alpha, variation = accepted(p, q), 0.5 * np.abs(p - q).sum()
            assert alpha == pytest.approx(1 - variation)
            found.append((alpha, kl, variation))
        assert 0 < len(found) < 2 * ROWS
        alphas, kls, variations = map(np.array, zip(*found, strict=True))
        weight = lk_loss.kl_scale * math.exp(-lk_loss.kl_decay * alphas.mean())
        mixed = weight * kls + (1 - weight) * variations
        summed = (-np.log(alphas) if lk_loss is ALPHA else mixed).sum()
        assert float(losses[step]) == pytest.approx(summed / (2 * ROWS), rel=1e-5)


def gradient(lk_loss: LkLoss, expected: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
    logits = logits.clone().requires_grad_()
    lk_losses(
        lk_loss, expected, logits.log_softmax(-1), torch.ones(expected.shape[:2])
    ).sum().backward()
    assert logits.grad is not None
    return logits.grad[0].numpy()


@given(seed=st.integers(0, 10_000), outside=st.integers(0, 5), scale=st.floats(0.1, 6.0))
@settings(max_examples=40, deadline=None)
def test_gradients_equal_the_closed_forms(seed: int, outside: int, scale: float):
    """dα/dz_j = q_j·([q_j < p_j] − Σ_{q < p} q): mass outside the draft's tokens has no effect."""
    random = np.random.default_rng(seed)
    rows, width = 4, 7
    p = softmax(scale * random.normal(size=(rows, width + outside)))[:, :width]
    logits = scale * random.normal(size=(rows, width))
    q = softmax(logits)
    said, given_logits = torch.from_numpy(np.log(p))[None], torch.from_numpy(logits)[None]
    below = (q < p).astype(float)
    of_alpha = q * (below - (q * below).sum(-1, keepdims=True))
    alpha = np.minimum(p, q).sum(-1, keepdims=True)
    found = gradient(ALPHA, said, given_logits)
    np.testing.assert_allclose(found, -of_alpha / alpha, rtol=1e-9, atol=1e-12)
    weight = math.exp(-3.0 * alpha.mean())  # a constant, whose gradient is omitted
    of_kl = q - p / p.sum(-1, keepdims=True)
    mixed = weight * of_kl - (1 - weight) * of_alpha
    found = gradient(LAMBDA, said, given_logits)
    np.testing.assert_allclose(found, mixed, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lk_loss", [ALPHA, LAMBDA])
def test_gradients_are_finite_if_no_token_is_accepted(lk_loss: LkLoss):
    """α is 1e-130, which is 0 in fp32; its logarithm and gradient are still finite."""
    said = torch.tensor([[[300.0, 0.0, 0.0]]]).log_softmax(-1)
    logits = torch.tensor([[[0.0, 300.0, 0.0]]])
    loss = lk_losses(lk_loss, said, logits.log_softmax(-1), torch.ones(1, 1))
    slope = gradient(lk_loss, said, logits)
    assert torch.isfinite(loss).all() and np.isfinite(slope).all()
    assert slope[0, 0] < 0 < slope[0, 1]


def test_without_decay_loss_and_gradient_equal_the_plain_loss():
    ids = torch.arange(0, VOCAB, 2)
    slopes = []
    for lk_loss in (None, replace(LAMBDA, kl_decay=0.0)):
        predictions, batch, teacher = case(ids)
        logits = [step.logits.requires_grad_() for step in predictions]
        objective(ids, lk_loss).losses(predictions, batch, teacher).sum().backward()
        slopes.append(torch.stack([step.grad for step in logits if step.grad is not None]))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(("kind", "lk_loss"), [("eagle3", LAMBDA), *slow(("dflash", ALPHA))])
def test_training_lowers_the_lk_loss_at_every_position(model, text, tmp_path, kind, lk_loss):
    changes: dict[str, Any] = {"draft_vocab": None} if kind == "dflash" else {}
    options = make_options(model, text, tmp_path / "d", kind=kind, lk=lk_loss, **changes)
    report = train_draft(options, SilentProgress())
    first, last = report.losses[0].per_position, report.losses[-1].per_position
    assert all(b < a for a, b in zip(first, last, strict=True))
    assert report.options["lk"]["lk_loss_type"] == lk_loss.lk_loss_type


@pytest.mark.parametrize(
    ("lk_loss", "message"),
    [
        (LkLoss(lk_loss_type="lambda", kl_scale=1.5), "kl_scale is 1.5, expected 0 to 1"),
        (LkLoss(lk_loss_type="lambda", kl_decay=-1.0), "kl_decay is -1.0, expected 0 or more"),
        (
            LkLoss(lk_loss_type="alpha", kl_decay=1.0),
            "kl_decay has an effect only with lk_loss_type lambda",
        ),
        (LkLoss(kl_scale=0.5), "kl_scale has an effect only with lk_loss_type lambda"),
    ],
)
def test_rejects_invalid_loss_options(model, text, tmp_path, lk_loss, message):
    with pytest.raises(SpecbuildError, match=message):
        make_options(model, text, tmp_path / "d", lk=lk_loss)
