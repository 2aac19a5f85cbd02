"""The loss of draft training, and its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.training.config import LkLoss
from specbuild.builder.training.draft_layers import DraftLogits, TokenWeights, TrainableDraft
from specbuild.builder.training.frozen_target import TeacherOutputs
from specbuild.builder.training.lk_loss import lk_losses


@dataclass(frozen=True)
class Batch:
    """Sequences ``ids`` [B, T], and ``counted`` bool [B, T].

    ``counted`` is true where the prediction *after* a token counts.
    """

    ids: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """The loss of ``ttt_steps`` steps, each with ``decay`` times the weight of the one before.

    Step i predicts draft position i. ``target_ids`` int64 [Vd] are the target's ids of the draft's
    tokens, and ``in_draft_vocab`` bool [V] marks them. With ``hard`` the label is the target's
    argmax, else its distribution. ``lk`` maximizes the acceptance rate and ignores ``hard``.
    """

    ttt_steps: int
    decay: float
    target_ids: torch.Tensor
    in_draft_vocab: torch.Tensor
    token_weights: TokenWeights
    hard: bool = False
    lk: LkLoss | None = None

    def rows(self, batch: Batch) -> int:
        """Return T − ttt_steps, the number of rows with a label for every step."""
        return batch.ids.shape[1] - self.ttt_steps

    def predict(
        self,
        draft: TrainableDraft,
        batch: Batch,
        teacher: TeacherOutputs,
        random: torch.Generator | None = None,
    ) -> list[DraftLogits]:
        """Return the draft's predictions at each step.

        Training passes ``random``, with which a draft may drop rows. Evaluation needs every row.
        """
        aux_hidden = teacher.aux_hidden[:, : self.rows(batch)]
        return draft.predict(aux_hidden, batch.ids, self.token_weights, self.ttt_steps, random)

    def losses(
        self, predictions: list[DraftLogits], batch: Batch, teacher: TeacherOutputs
    ) -> torch.Tensor:
        """Return mean(mask · loss) of each step, fp32 [ttt_steps].

        The loss of a position is −Σ_v p_v log q_v, or the LK loss. p is the softmax of the
        target's logits over the draft vocabulary, or with ``hard`` 1 for its best token. LK losses
        use p over all tokens. The mask drops positions that do not count, and those where the
        target's argmax is not in the draft vocabulary.
        """
        labels = teacher.logits[..., self.target_ids].float()
        best_ids = labels.argmax(dim=-1)
        if self.lk is not None:
            labels = labels - teacher.logits.float().logsumexp(dim=-1, keepdim=True)
        mask = (self.in_draft_vocab[teacher.logits.argmax(dim=-1)] & batch.counted).float()
        losses = []
        for step, (rows, logits) in enumerate(predictions):
            label_rows, log_q = rows + 1 + step, logits.float().log_softmax(dim=-1)
            if self.lk is not None:
                loss = lk_losses(self.lk, labels[:, label_rows], log_q, mask[:, label_rows])
            elif self.hard:
                loss = -log_q.gather(-1, best_ids[:, label_rows, None]).squeeze(-1)
            else:
                loss = -(labels[:, label_rows].softmax(dim=-1) * log_q).sum(dim=-1)
            losses.append((mask[:, label_rows] * loss).mean())
        return torch.stack(losses)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Return Σ_i decay^i · losses_i."""
        return (losses * self.decay ** torch.arange(len(losses), device=losses.device)).sum()
