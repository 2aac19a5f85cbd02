"""The terms of the loss of new heads, each a mean over a batch's positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specbuild.builder.training.heads.backbone import States
from specbuild.builder.training.heads.terms import (
    HIDDEN_MSE,
    LOGIT_TERMS,
    LOGITS_KL,
    LONG_LOGITS,
)

# Logits are computed for this many rows at a time, because those of a large vocabulary do not fit.
_ROWS = 1024


@dataclass(frozen=True)
class Lesson:
    """A teacher's and a student's states of the same rows; ``counted`` is bool [B, T].

    ``positions`` divides the sums: it is the number of tokens of the whole batch, of which these
    rows may be a part. ``long_from`` is the first position of a long context.
    """

    teacher: States
    student: States
    counted: torch.Tensor
    positions: int
    long_from: int
    extra_terms: Mapping[str, torch.Tensor] = field(default_factory=dict)


def terms(lesson: Lesson, head: nn.Module, weights: Mapping[str, float]) -> torch.Tensor:
    """Return the unweighted terms of ``weights``, in its order, fp32 [terms]."""
    values = dict(lesson.extra_terms)
    names = tuple(name for name in weights if name in LOGIT_TERMS)
    if names:
        values |= dict(zip(names, _logit_terms(lesson, head, names), strict=True))
    if HIDDEN_MSE in weights:
        values[HIDDEN_MSE] = _hidden_mse(lesson)
    return torch.stack([values[name] for name in weights])


def total(values: torch.Tensor, weights: Mapping[str, float]) -> torch.Tensor:
    """Return the weighted sum of :func:`terms`."""
    parts = zip(values.unbind(), weights.values(), strict=True)
    return torch.stack([part * weight for part, weight in parts]).sum()


def _logit_terms(lesson: Lesson, head: nn.Module, names: tuple[str, ...]) -> torch.Tensor:
    counted = lesson.counted.flatten()
    is_long = torch.arange(lesson.counted.shape[1], device=counted.device) >= lesson.long_from
    is_long = (is_long & lesson.counted).flatten()
    parts = [
        x.split(_ROWS)
        for x in (
            lesson.teacher.last.flatten(0, 1), lesson.student.last.flatten(0, 1), counted, is_long
        )
    ]  # fmt: skip
    sums = [
        checkpoint(_row_terms, head, names, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(*parts, strict=True)
    ]
    return torch.stack(sums).sum(0) / lesson.positions


def _row_terms(  # noqa: PLR0917
    head: nn.Module,
    names: tuple[str, ...],
    teacher: torch.Tensor,
    student: torch.Tensor,
    counted: torch.Tensor,
    is_long: torch.Tensor,
) -> torch.Tensor:
    """Return the sums of the requested terms over rows [R, H]."""
    expected, actual = head(teacher).float(), head(student).float()
    values = []
    for name in names:
        if name == LOGITS_KL:
            kl = F.kl_div(
                actual.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True
            )
            values.append((kl.sum(-1) * counted).sum())
        else:
            mask = is_long if name == LONG_LOGITS else counted
            values.append(((actual - expected).square().mean(-1) * mask).sum())
    return torch.stack(values)


def _hidden_mse(lesson: Lesson) -> torch.Tensor:
    """Return the mean over layers of ``‖x − x*‖² / ‖x*‖²``, where x* is the teacher's."""
    shares = []
    for layer, expected in lesson.teacher.hidden.items():
        change = (lesson.student.hidden[layer].float() - expected.float()).square().sum(-1)
        shares.append(change / expected.float().square().sum(-1))
    mean = torch.stack(shares).mean(0)
    return (mean * lesson.counted).sum() / lesson.positions
