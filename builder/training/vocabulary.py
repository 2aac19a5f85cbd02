"""The draft's vocabulary: the target ids that the training text uses most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class DraftVocabulary:
    """``target_ids`` int64 [Vd], ascending: the target id of each draft id."""

    target_ids: torch.Tensor
    target_vocab: int
    coverage: float

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets int64 [Vd]: target id = draft id + d2t[draft id]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """Which target ids the draft knows: bool [V]."""
        return torch.zeros(self.target_vocab, dtype=torch.bool).scatter(0, self.target_ids, True)


def choose_vocabulary(tokens: np.ndarray, *, target_vocab: int, size: int) -> DraftVocabulary:
    """The ``size`` most frequent ids of ``tokens``, ties to the lower id.

    ``coverage`` is their share of the tokens.
    """
    counts = np.bincount(tokens, minlength=target_vocab)
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return DraftVocabulary(
        target_ids=torch.from_numpy(kept.astype(np.int64)),
        target_vocab=target_vocab,
        coverage=float(counts[kept].sum() / max(1, len(tokens))),
    )
