"""What training a draft minimises, and what its rows stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.training.config import LkLoss
from specbuild.builder.training.draft_layers import Drafted, TrainedDraft, Words
from specbuild.builder.training.frozen_target import Teaching
from specbuild.builder.training.lk_loss import lk_losses


@dataclass(frozen=True)
class Batch:
    """Sequences ``ids`` [B, T]; ``counted`` bool [B, T] where what is predicted *after* a token
    counts."""

    ids: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """The loss over ``ttt_steps`` steps, each weighted ``decay`` times the one before.

    A step is a position ahead. ``target_ids`` int64 [Vd] of the draft ids; ``known`` bool [V] the
    ids in the draft vocabulary. ``hard`` learns the target's argmax, not its distribution; ``lk``
    the chance of acceptance, whatever ``hard`` says.
    """

    ttt_steps: int
    decay: float
    target_ids: torch.Tensor
    known: torch.Tensor
    words: Words
    hard: bool = False
    lk: LkLoss | None = None

    def rows(self, batch: Batch) -> int:
        """Rows t whose every step has a target to predict: T − ttt_steps."""
        return batch.ids.shape[1] - self.ttt_steps

    def drafted(
        self,
        draft: TrainedDraft,
        batch: Batch,
        teaching: Teaching,
        random: torch.Generator | None = None,
    ) -> list[Drafted]:
        """What the draft says at each step; of a part of the rows, where it drops some at random.

        That is for training; without ``random`` it is of every row.
        """
        aux_hidden = teaching.aux_hidden[:, : self.rows(batch)]
        return draft.drafted(aux_hidden, batch.ids, self.words, self.ttt_steps, random)

    def losses(self, drafted: list[Drafted], batch: Batch, teaching: Teaching) -> torch.Tensor:
        """mean(mask · loss) of each step, fp32 [ttt_steps].

        The loss of a position is −Σ_v p_v log q_v, or the LK loss asked for. p is the softmax of
        the target logits over the draft vocabulary, or 1 for its best token; of LK losses over all
        tokens. The mask drops positions that do not count and those whose target argmax the draft
        does not know.
        """
        said = teaching.logits[..., self.target_ids].float()
        best = said.argmax(dim=-1)
        if self.lk is not None:
            said = said - teaching.logits.float().logsumexp(dim=-1, keepdim=True)
        mask = (self.known[teaching.logits.argmax(dim=-1)] & batch.counted).float()
        losses = []
        for step, (rows, logits) in enumerate(drafted):
            ahead, log_q = rows + 1 + step, logits.float().log_softmax(dim=-1)
            if self.lk is not None:
                loss = lk_losses(self.lk, said[:, ahead], log_q, mask[:, ahead])
            elif self.hard:
                loss = -log_q.gather(-1, best[:, ahead, None]).squeeze(-1)
            else:
                loss = -(said[:, ahead].softmax(dim=-1) * log_q).sum(dim=-1)
            losses.append((mask[:, ahead] * loss).mean())
        return torch.stack(losses)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Σ_i decay^i · losses_i."""
        return (losses * self.decay ** torch.arange(len(losses), device=losses.device)).sum()
