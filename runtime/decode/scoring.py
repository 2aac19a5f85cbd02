"""The target's logits after every token of a given sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.logit_rows import most_likely
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Request, SequenceState, TopLogprobs
from specbuild.runtime.statistics import RunCounters


@dataclass(frozen=True)
class ScoredRows:
    """The target's outputs at tokens ``first …`` of a sequence.

    ``logits`` fp32 [n, V]. ``aux_hidden`` [n, C] holds the features that a draft reads, in the
    engine's type (bf16 bit patterns on a device); None in an engine without a draft.
    """

    first: int
    logits: np.ndarray
    aux_hidden: np.ndarray | None


class TokenScore(NamedTuple):
    """A token of a sequence: its log-probability, and its rank among all tokens, from 1.

    Of tokens with equal logits, the lower id ranks first.
    ``top_logprobs`` are the most likely tokens at its position.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: TopLogprobs


def token_scores(rows: ScoredRows, ids: Sequence[int], num_top: int) -> list[TokenScore]:
    """Return the scores of the tokens that follow the rows in the sequence ``ids``."""
    following = np.array(ids[rows.first + 1 : rows.first + 1 + len(rows.logits)], np.int64)
    logits = rows.logits[: len(following)]
    maxima = logits.max(1, keepdims=True, initial=-np.inf)
    sums = np.exp(logits - maxima).sum(1, dtype=np.float64)
    chosen = logits[np.arange(len(following)), following]
    logprobs = chosen.astype(np.float64) - maxima[:, 0] - np.log(sums)
    is_lower_id = np.arange(logits.shape[1]) < following[:, None]
    is_above = (logits > chosen[:, None]) | ((logits == chosen[:, None]) & is_lower_id)
    ranks = is_above.sum(1) + 1
    scores = []
    for row, token, logprob, rank in zip(logits, following, logprobs, ranks, strict=True):
        top = most_likely(row, num_top, token=token, logprob=logprob) if num_top else ()
        scores.append(TokenScore(int(token), float(logprob), int(rank), top))
    return scores


@contextmanager
def scored_sequence(ids: Sequence[int], kv: KvPools) -> Iterator[SequenceState]:
    """Yield a sequence of these tokens with all its pages, which are released at the end.

    Raises RequestError if too few pages are free.
    """
    pages_needed = kv.pages_needed(len(ids))
    if not kv.can_admit(pages_needed):
        raise RequestError(f"cannot score {len(ids)} tokens: too few free cache pages")
    sequence = SequenceState(
        request=Request("score", tuple(ids), GenerateParams(), 1),
        index=0,
        ids=np.array([*ids, 0], np.int32),
        pages=kv.admit(pages_needed),
        counters=RunCounters(0),
        text=None,
        num_tokens=len(ids),
    )
    try:
        yield sequence
    finally:
        kv.release(sequence.pages)
