"""Compares a draft over the target's caches with its form in transformers."""

from __future__ import annotations

import numpy as np
import torch

from specbuild.builder.families.parts.path_draft import CacheDraft
from specbuild.builder.verify.comparison import Comparison
from specbuild.builder.verify.engine_probe import ProbedSequence


def compare_levels(
    sequence: ProbedSequence,
    draft: CacheDraft,
    comparison: Comparison,
    *,
    aux_hidden: np.ndarray,
    ids: np.ndarray,
    path: np.ndarray,
) -> None:
    """Add the states and logits of a chain's levels to ``comparison``.

    The target's caches hold ``ids`` [L]. ``aux_hidden`` [1, H] is the engine's state of the last of
    them. ``path`` [D] has the root and the tokens of the first D − 1 levels.
    """
    tokens = torch.from_numpy(path.astype(np.int64))
    expected = draft.levels(torch.from_numpy(ids.astype(np.int64)), int(path[0]), tokens[1:])
    hidden = sequence.fuse(aux_hidden)
    comparison.states({"fuse": hidden}, {"fuse": expected.state[None].numpy()})
    for level, token in enumerate(path):
        feeds = {"token_ids": np.array([token], np.int32), "hidden": hidden}
        outputs = sequence.attend("draft", feeds)
        hidden, row = outputs["hidden_out"], slice(level, level + 1)
        comparison.states(
            {"draft recurrence": hidden}, {"draft recurrence": expected.recurrence[row].numpy()}
        )
        comparison.logits("draft logits", outputs["draft_logits"], expected.logits[row].numpy())
