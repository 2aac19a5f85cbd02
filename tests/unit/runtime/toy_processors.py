"""Logit processors in a toy step: the declared references, with the step's ports."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import FORCED_ROWS
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS

_STATE = (*("min_position", "repetition", "frequency", "presence", "bias", "mask", "marks"),)


def processed(
    port: Callable[[str, int], torch.Tensor],
    raw: torch.Tensor,
    how: tuple[torch.Tensor | None, ...],
    path: tuple[torch.Tensor | None, torch.Tensor | None],
    sequences: int,
    row_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and log-probabilities of the rows of ``sequences`` from ``raw`` [R, V].

    ``how`` has the inputs of Choose. ``path`` has the tokens and ancestors of the rows.
    ``row_start`` is that of a ragged step. The ports of the most likely tokens are written.
    """
    assert how[4] is not None
    changes = port("changes", sequences)
    # Older engines do not have this port and force no rows.
    forced = torch.zeros_like(changes)
    if (changes & FORCED_ROWS).any():
        forced = port("forced", sequences)
    logits, raw = op_named("AdjustLogits").reference(
        *(raw, *path, how[4], changes, forced),
        *(port(name, sequences) for name in _STATE),
        row_start,
    )
    choice, chosen = op_named("Choose").reference(logits, *how)
    asked = (changes, forced, port("top_count", sequences))
    logprob, top_ids, top_logprobs = op_named("TopLogprobs").reference(
        logits, raw, choice, chosen, *asked, row_start, most=MAX_TOP_LOGPROBS
    )
    if row_start is not None:
        port("first_rows", sequences + 1).copy_(row_start)
    port("top_ids", len(raw)).copy_(top_ids)
    port("top_logprobs", len(raw)).copy_(top_logprobs)
    return choice, logprob
