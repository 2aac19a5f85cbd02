"""Compares a draft of one pass per block with its plain torch form."""

from __future__ import annotations

import numpy as np
import torch

from specbuild.builder.families.parts.path_draft import BlockDraft
from specbuild.builder.verify.comparison import Comparison
from specbuild.builder.verify.engine_probe import ProbedSequence


def compare_block(
    sequence: ProbedSequence,
    draft: BlockDraft,
    comparison: Comparison,
    *,
    aux_hidden: tuple[np.ndarray, np.ndarray],
    root: int,
) -> None:
    """Return the logits of a block after ``root``, over states from two launches.

    ``aux_hidden`` [L, aux_layers·Ht] are the engine's and the expected ones.
    """
    given, expected = aux_hidden
    cut = max(1, len(given) // 2 - 1)
    for rows in (slice(0, cut), slice(cut, None)):
        if len(given[rows]):
            sequence.write_states(given[rows])
    count = draft.block_size
    tokens = np.full(count, draft.mask_token, np.int32)
    tokens[0] = root
    visible = np.tri(count, dtype=bool) if draft.causal else np.ones((count, count), bool)
    outputs = sequence.branch(
        "draft",
        {"token_ids": tokens},
        slots=range(count),
        positions=range(len(given), len(given) + count),
        ancestors=visible,
    )
    sequence.forget_tree("draft")
    expected_logits = draft.logits(torch.from_numpy(expected), root)
    drafted_logits = outputs["draft_logits"][draft.first_row :]
    comparison.logits("draft block", drafted_logits, expected_logits.numpy())
