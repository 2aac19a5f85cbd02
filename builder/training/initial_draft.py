"""Another draft's weights as the beginning of a training."""

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
    """The vocabulary of the draft at ``path``, None where it has the target's.

    Raises SpecbuildError where it has not ``size`` tokens of the target's.
    """
    stored = open_directory(path).get("d2t")
    if stored is None:
        return None
    offsets = stored.load().long()
    ids = offsets + torch.arange(len(offsets))
    if len(ids) != size or not ((ids >= 0) & (ids < target_vocab)).all():
        raise SpecbuildError(
            f"train draft: the draft at {path} says {len(ids)} tokens, {size} are asked for; give "
            f"--draft-vocab {len(ids)} and the target that it was trained for"
        )
    counts = np.bincount(tokens, minlength=target_vocab)
    coverage = float(counts[ids.numpy()].sum() / max(1, len(tokens)))
    return DraftVocabulary(ids, target_vocab, coverage)


@torch.no_grad()
def begin_from(path: Path, draft: Any) -> int:
    """Copies what the draft at ``path`` has by the same name and shape; how many tensors that were.

    Raises SpecbuildError where there is none.
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
            "give one of the same kind and sizes, or leave --initial out"
        )
    return copied
