"""A request's own changes to rows of logits, and the likeliest tokens of a row.

They are numpy on the host, in front of the role ``choose``: every engine whose logits reach the
host serves them with the graphs that it has, and a row that asks for none of them costs nothing.
The argmax, the cuts of top-k and top-p, and the noise remain the graph's.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from specbuild.runtime.guides.grammar import REFUSED, TokenMask
from specbuild.runtime.request import GenerateParams, TopLogprobs
from specbuild.runtime.sampling import MASKED, SamplingParams


def adjust(
    logits: np.ndarray,
    params: GenerateParams,
    *,
    prompt: np.ndarray,
    output: np.ndarray,
    eos_token_ids: Collection[int],
    mask: TokenMask | None = None,
) -> None:
    """Changes one row ``logits`` fp32 [V] in place, by steps 1 to 4 and 6 of SamplingParams.

    ``prompt`` and ``output`` are the token ids before the row; ``mask`` is what a guide allows.
    """
    sampling = params.sampling
    ids, biases = sampling.bias_arrays
    logits[ids] += biases
    if len(output) < params.min_tokens:
        logits[ends_of(params, eos_token_ids, len(logits))] = MASKED
    _penalise(logits, sampling, prompt, output)
    if mask is not None:
        mask.refuse(logits)
    if sampling.floor < 0:
        logits[logits < logits.max() + np.float32(sampling.floor)] = REFUSED


def ends_of(params: GenerateParams, eos_token_ids: Collection[int], vocab: int) -> list[int]:
    """The tokens that end a request's output, of those that the model has."""
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    return [token for token in ends if 0 <= token < vocab]


def _penalise(
    logits: np.ndarray, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray
) -> None:
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.concatenate([prompt, output]))
        value, penalty = logits[seen], np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(value > 0, value / penalty, value * penalty)
    if sampling.frequency_penalty != 0 or sampling.presence_penalty != 0:
        seen, count = np.unique(output, return_counts=True)
        frequency = np.float32(sampling.frequency_penalty) * count.astype(np.float32)
        logits[seen] = logits[seen] - frequency - np.float32(sampling.presence_penalty)


def log_probability(logits: np.ndarray, token: int) -> np.float32:
    """The natural log-probability of a token under one row ``logits`` fp32 [V]."""
    wide = logits.astype(np.float64)
    maximum = wide.max()
    return np.float32(wide[token] - maximum - np.log(np.exp(wide - maximum).sum()))


def most_likely(logits: np.ndarray, count: int, *, token: int, logprob: float) -> TopLogprobs:
    """The ``count`` likeliest tokens of one row [V], of equal ones the lower ids.

    ``logprob`` is the log-probability of ``token`` in this row, to which the others are relative.
    """
    count = min(count, len(logits))
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= threshold)
    best = ids[np.lexsort((ids, -logits[ids]))][:count]
    relative = logits[best].astype(np.float64) - float(logits[token]) + logprob
    return tuple(zip(best.tolist(), relative.tolist(), strict=True))
