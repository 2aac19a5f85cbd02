"""Measures a draft's acceptance on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.draft_layers import TrainableDraft
from specbuild.builder.training.frozen_target import FrozenTarget
from specbuild.builder.training.objective import Objective

CHAIN = 3


@dataclass(frozen=True)
class Acceptance:
    """Agreement of a draft and its target's argmax, with the text as input (teacher forcing).

    ``agreement[i]`` is the share of counted positions where step i's argmax is the target's.
    ``mean_acceptance_length`` is the number of tokens per target pass of greedy decoding along the
    rows with ``chain`` draft tokens. It is exact on the target's greedy text, else an estimate.
    """

    rows: int
    positions: int
    loss: float
    agreement: tuple[float, ...]
    chain: int
    mean_acceptance_length: float


@dataclass(frozen=True)
class Examiner:
    """Measures drafts of one target; ``autocast`` returns the context of a forward pass."""

    target: FrozenTarget
    objective: Objective
    device: str
    batch_size: int
    autocast: Callable[[], AbstractContextManager[object]]

    @torch.no_grad()
    def acceptance(self, draft: TrainableDraft, rows: Rows) -> Acceptance | None:
        """Return the acceptance, or None if there is no counted position."""
        agreed, counted, loss = [], [], []
        for start in range(0, len(rows.ids), self.batch_size):
            batch = rows.batch(slice(start, start + self.batch_size), self.device)
            with self.autocast():
                teacher = self.target.teach(batch.ids)
                predictions = self.objective.predict(draft, batch, teacher)
                losses = self.objective.losses(predictions, batch, teacher)
            target_ids = teacher.logits.argmax(dim=-1)
            draft_ids = [
                self.objective.target_ids[step.logits.argmax(dim=-1)] for step in predictions
            ]
            count = self.objective.rows(batch)
            matches = [
                step_ids == target_ids[:, 1 + i : 1 + i + count]
                for i, step_ids in enumerate(draft_ids)
            ]
            masks = [batch.counted[:, 1 + i : 1 + i + count] for i in range(len(draft_ids))]
            agreed.append(torch.stack(matches, dim=-1).cpu().numpy())
            counted.append(torch.stack(masks, dim=-1).cpu().numpy())
            loss.append((float(self.objective.total(losses)), len(batch.ids)))
        if not counted or not np.concatenate(counted)[..., 0].any():
            return None
        return _summary(np.concatenate(agreed), np.concatenate(counted), loss)


def _summary(agreed: np.ndarray, counted: np.ndarray, loss: list[tuple[float, int]]) -> Acceptance:
    """Summarize ``agreed`` and ``counted``, bool [N, R, steps]."""
    shares = (agreed & counted).sum((0, 1)) / np.maximum(1, counted.sum((0, 1)))
    chain = min(CHAIN, agreed.shape[-1])
    return Acceptance(
        rows=len(agreed),
        positions=int(counted[..., 0].sum()),
        loss=sum(value * rows for value, rows in loss) / sum(rows for _, rows in loss),
        agreement=tuple(float(share) for share in shares),
        chain=chain,
        mean_acceptance_length=chain_acceptance(agreed[..., :chain], counted[..., :chain]),
    )


def chain_acceptance(agreed: np.ndarray, counted: np.ndarray) -> float:
    """Return the mean tokens per step of a walk along each row; arguments are bool [N, R, chain].

    At row t the target accepts the a leading agreements and adds one token. The walk continues at
    t + a + 1. Positions that do not count are not drafted.
    """
    accepted = (agreed & counted).cumprod(axis=-1).sum(axis=-1)
    tokens = steps = 0
    for row, starts in zip(accepted, counted[..., 0], strict=True):
        t = 0
        while t < len(row):
            if not starts[t]:
                t += 1
                continue
            tokens += int(row[t]) + 1
            steps += 1
            t += int(row[t]) + 1
    return tokens / steps
