"""The target's logits behind every token of a sequence, of any engine."""

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
    """What the target says behind tokens ``first …`` of a sequence.

    ``logits`` fp32 [n, V]; ``aux_hidden`` [n, C], the features that a draft reads, as the engine
    holds them (bf16 bit patterns on a device), None in an engine without a draft.
    """

    first: int
    logits: np.ndarray
    aux_hidden: np.ndarray | None


@contextmanager
def scored_sequence(ids: Sequence[int], kv: KvPools) -> Iterator[SequenceState]:
    """A sequence of known tokens, with all the pages that it needs.

    Raises RequestError where pages are not free.
    """
    wanted = kv.pages_needed(len(ids))
    if not kv.can_admit(wanted):
        raise RequestError(f"{len(ids)} tokens to score: no free cache pages")
    sequence = SequenceState(
        request=Request("score", tuple(ids), GenerateParams(), 1),
        index=0,
        ids=np.array([*ids, 0], np.int32),
        pages=kv.admit(wanted),
        counters=RunCounters(0),
        text=None,
        num_tokens=len(ids),
    )
    try:
        yield sequence
    finally:
        kv.release(sequence.pages)
