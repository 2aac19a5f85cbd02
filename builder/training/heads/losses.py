"""The terms that training of new heads may minimise, each a mean over a batch's positions."""

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

# Logits are made for so many rows at a time: a large vocabulary's would not fit all at once.
_ROWS = 1024


@dataclass(frozen=True)
class Lesson:
    """A teacher's and a student's states of the same rows; ``counted`` bool [B, T].

    ``positions`` is what sums are divided by: the tokens of the whole batch, of which these rows
    may be a part. ``long_from``: the first position of a long context.
    """

    teacher: States
    student: States
    counted: torch.Tensor
    positions: int
    long_from: int
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)


def terms(lesson: Lesson, head: nn.Module, weights: Mapping[str, float]) -> torch.Tensor:
    """The terms that ``weights`` names, in its order, fp32 [terms]; unweighted."""
    found = dict(lesson.beside)
    asked = tuple(name for name in weights if name in LOGIT_TERMS)
    if asked:
        found |= dict(zip(asked, _logit_terms(lesson, head, asked), strict=True))
    if HIDDEN_MSE in weights:
        found[HIDDEN_MSE] = _hidden_mse(lesson)
    return torch.stack([found[name] for name in weights])


def total(found: torch.Tensor, weights: Mapping[str, float]) -> torch.Tensor:
    """The weighted sum of :func:`terms`."""
    parts = zip(found.unbind(), weights.values(), strict=True)
    return torch.stack([part * weight for part, weight in parts]).sum()


def _logit_terms(lesson: Lesson, head: nn.Module, asked: tuple[str, ...]) -> torch.Tensor:
    counted = lesson.counted.flatten()
    late = torch.arange(lesson.counted.shape[1], device=counted.device) >= lesson.long_from
    late = (late & lesson.counted).flatten()
    parts = [
        x.split(_ROWS)
        for x in (
            lesson.teacher.last.flatten(0, 1), lesson.student.last.flatten(0, 1), counted, late
        )
    ]  # fmt: skip
    sums = [
        checkpoint(_row_terms, head, asked, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(*parts, strict=True)
    ]
    return torch.stack(sums).sum(0) / lesson.positions


def _row_terms(  # noqa: PLR0917
    head: nn.Module,
    asked: tuple[str, ...],
    teacher: torch.Tensor,
    student: torch.Tensor,
    counted: torch.Tensor,
    late: torch.Tensor,
) -> torch.Tensor:
    """Sums over rows [R, H] of the terms asked for."""
    wanted, got = head(teacher).float(), head(student).float()
    found = []
    for name in asked:
        if name == LOGITS_KL:
            kl = F.kl_div(
                got.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
            )
            found.append((kl.sum(-1) * counted).sum())
        else:
            mask = late if name == LONG_LOGITS else counted
            found.append(((got - wanted).square().mean(-1) * mask).sum())
    return torch.stack(found)


def _hidden_mse(lesson: Lesson) -> torch.Tensor:
    """Mean over layers of ``‖x − x*‖² / ‖x*‖²``, x* being the teacher's."""
    shares = []
    for layer, wanted in lesson.teacher.hidden.items():
        change = (lesson.student.hidden[layer].float() - wanted.float()).square().sum(-1)
        shares.append(change / wanted.float().square().sum(-1))
    mean = torch.stack(shares).mean(0)
    return (mean * lesson.counted).sum() / lesson.positions
