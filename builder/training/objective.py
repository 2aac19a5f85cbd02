"""What test-time training minimises, and what its rows stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specbuild.builder.training.draft_module import DraftModule
from specbuild.builder.training.frozen_target import Teaching


@dataclass(frozen=True)
class Batch:
    """Sequences ``ids`` [B, T]; ``counted`` bool [B, T] where what is predicted *after* a token
    counts."""

    ids: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """The loss over ``ttt_steps`` steps, each weighted ``decay`` times the one before.

    ``target_ids`` int64 [Vd] of the draft ids; ``known`` bool [V] the ids in the draft vocabulary;
    ``embedding`` [V, H] the target's.
    """

    ttt_steps: int
    decay: float
    target_ids: torch.Tensor
    known: torch.Tensor
    embedding: torch.Tensor

    def rows(self, batch: Batch) -> int:
        """Rows t whose every step has a target to predict: T − ttt_steps."""
        return batch.ids.shape[1] - self.ttt_steps

    def logits(self, draft: DraftModule, batch: Batch, teaching: Teaching) -> list[torch.Tensor]:
        """The draft's logits [B, R, Vd] of each step."""
        rows = self.rows(batch)
        embedded = F.embedding(batch.ids[:, 1:], self.embedding)
        aux_hidden = teaching.aux_hidden[:, :rows]
        return list(draft.steps(aux_hidden, embedded, self.ttt_steps))

    def losses(self, logits: list[torch.Tensor], batch: Batch, teaching: Teaching) -> torch.Tensor:
        """mean(−mask · Σ_v p_v log q_v) of each step, fp32 [ttt_steps].

        p is the softmax of the target logits over the draft vocabulary; the mask drops positions
        that do not count and those whose target argmax the draft does not know.
        """
        p = teaching.logits[..., self.target_ids].float().softmax(dim=-1)
        mask = (self.known[teaching.logits.argmax(dim=-1)] & batch.counted).float()
        rows, losses = self.rows(batch), []
        for step, drafted in enumerate(logits):
            ahead = slice(1 + step, 1 + step + rows)
            cross_entropy = -(p[:, ahead] * drafted.float().log_softmax(dim=-1)).sum(dim=-1)
            losses.append((mask[:, ahead] * cross_entropy).mean())
        return torch.stack(losses)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Σ_i decay^i · losses_i."""
        return (losses * self.decay ** torch.arange(len(losses), device=losses.device)).sum()
