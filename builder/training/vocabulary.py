"""The draft's vocabulary: the most frequent target ids of the training text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class DraftVocabulary:
    """``target_ids`` int64 [Vd] is the target id of each draft id, in ascending order."""

    target_ids: torch.Tensor
    target_vocab: int
    coverage: float

    @property
    def d2t(self) -> torch.Tensor:
        """Return offsets int64 [Vd]: target id = draft id + d2t[draft id]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """Return which target ids are in the vocabulary, bool [V]."""
        return torch.zeros(self.target_vocab, dtype=torch.bool).scatter(0, self.target_ids, True)


def choose_vocabulary(tokens: np.ndarray, *, target_vocab: int, size: int) -> DraftVocabulary:
    """Return the ``size`` most frequent ids of ``tokens``; the lower of equally frequent ids.

    ``coverage`` is their share of the tokens.
    """
    counts = np.bincount(tokens, minlength=target_vocab)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    return DraftVocabulary(
        target_ids=torch.from_numpy(ids.astype(np.int64)),
        target_vocab=target_vocab,
        coverage=float(counts[ids].sum() / max(1, len(tokens))),
    )
