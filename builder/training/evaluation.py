"""How well a draft predicts its target on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.draft_layers import TrainedDraft
from specbuild.builder.training.frozen_target import FrozenTarget
from specbuild.builder.training.objective import Objective

CHAIN = 3


@dataclass(frozen=True)
class Acceptance:
    """A draft against its target's argmax, with the text's own tokens as input (teacher forcing).

    ``agreement[i]``: share of counted positions where step i's argmax is the target's.
    ``mean_acceptance_length``: tokens per target pass of greedy decoding along the rows with a
    chain of ``chain`` drafts; exact on text that the target wrote greedily, an estimate elsewhere.
    """

    rows: int
    positions: int
    loss: float
    agreement: tuple[float, ...]
    chain: int
    mean_acceptance_length: float


@dataclass(frozen=True)
class Examiner:
    """Measures drafts of one target; ``autocast`` makes the context of a forward pass."""

    target: FrozenTarget
    objective: Objective
    device: str
    batch_size: int
    autocast: Callable[[], AbstractContextManager[object]]

    @torch.no_grad()
    def acceptance(self, draft: TrainedDraft, rows: Rows) -> Acceptance | None:
        """None where there is nothing to measure: no row, or no counted position."""
        agreed, counted, loss = [], [], []
        for start in range(0, len(rows.ids), self.batch_size):
            batch = rows.batch(slice(start, start + self.batch_size), self.device)
            with self.autocast():
                teaching = self.target.teach(batch.ids)
                drafted = self.objective.drafted(draft, batch, teaching)
                losses = self.objective.losses(drafted, batch, teaching)
            right = teaching.logits.argmax(dim=-1)
            ids = [self.objective.target_ids[step.logits.argmax(dim=-1)] for step in drafted]
            count = self.objective.rows(batch)
            pairs = [said == right[:, 1 + i : 1 + i + count] for i, said in enumerate(ids)]
            masks = [batch.counted[:, 1 + i : 1 + i + count] for i in range(len(ids))]
            agreed.append(torch.stack(pairs, dim=-1).cpu().numpy())
            counted.append(torch.stack(masks, dim=-1).cpu().numpy())
            loss.append((float(self.objective.total(losses)), len(batch.ids)))
        if not counted or not np.concatenate(counted)[..., 0].any():
            return None
        return _summary(np.concatenate(agreed), np.concatenate(counted), loss)


def _summary(agreed: np.ndarray, counted: np.ndarray, loss: list[tuple[float, int]]) -> Acceptance:
    """``agreed`` and ``counted`` bool [N, R, steps]."""
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
    """Mean tokens per step of a walk along each row, [N, R, chain] bool.

    At row t the leading agreements a are accepted; the target adds one token, and the walk goes on
    at t + a + 1. Steps that would leave the counted part are not drafted.
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
