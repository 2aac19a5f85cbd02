"""The target's logits after every token of a given sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Request, SequenceState
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
