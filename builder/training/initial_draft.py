"""Initializes a training from another draft's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbuild.builder.checkpoint.source import open_directory
from specbuild.builder.training.vocabulary import DraftVocabulary
from specbuild.runtime.errors import SpecbuildError


def initial_vocabulary(
    path: Path, tokens: np.ndarray, *, target_vocab: int, size: int
) -> DraftVocabulary | None:
    """Return the vocabulary of the draft at ``path``, or None if it uses the target's.

    Raises SpecbuildError if it does not have ``size`` tokens of the target.
    """
    stored = open_directory(path).get("d2t")
    if stored is None:
        return None
    offsets = stored.load().long()
    ids = offsets + torch.arange(len(offsets))
    if len(ids) != size or not ((ids >= 0) & (ids < target_vocab)).all():
        raise SpecbuildError(
            f"train draft: the draft at {path} has a vocabulary of {len(ids)} tokens, expected "
            f"{size}; use --draft-vocab {len(ids)} and the target for which it was trained"
        )
    counts = np.bincount(tokens, minlength=target_vocab)
    coverage = float(counts[ids.numpy()].sum() / max(1, len(tokens)))
    return DraftVocabulary(ids, target_vocab, coverage)


@torch.no_grad()
def load_initial_weights(path: Path, draft: Any) -> int:
    """Copy the tensors of the same name and shape from the draft at ``path``; return their number.

    Raises SpecbuildError if there are none.
    """
    stored = open_directory(path)
    copied = 0
    for name, parameter in draft.named_parameters():
        tensor = stored.get(name)
        if tensor is not None and tensor.shape == tuple(parameter.shape):
            parameter.copy_(tensor.load().float())
            copied += 1
    if not copied:
        raise SpecbuildError(
            f"train draft: the draft at {path} has no tensor of this draft's names and shapes; "
            "use a draft of the same kind and sizes, or remove --initial"
        )
    return copied
