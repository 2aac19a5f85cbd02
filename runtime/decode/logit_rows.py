"""Logit processors on the host, and the most likely tokens of a row.

The processors run in numpy before the role ``choose``, on every engine whose logits reach the host.
A row whose request has no processor costs nothing. Argmax, top-k, top-p and sampling noise stay in
the graph.
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
    """Apply steps 1 to 4 and 6 of SamplingParams to one row ``logits`` fp32 [V], in place.

    ``prompt`` and ``output`` are the token ids before the row. ``mask`` holds the tokens that a
    guide allows.
    """
    sampling = params.sampling
    if sampling.allowed_token_ids:
        logits += sampling.bias_row(len(logits))
    else:
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
    """Return the tokens of the vocabulary that end the output of a request."""
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
    """Return the natural log-probability of a token, given one row ``logits`` fp32 [V]."""
    wide = logits.astype(np.float64)
    maximum = wide.max()
    return np.float32(wide[token] - maximum - np.log(np.exp(wide - maximum).sum()))


def most_likely(logits: np.ndarray, count: int, *, token: int, logprob: float) -> TopLogprobs:
    """Return the ``count`` most likely tokens of a row [V]; ties go to the lower id.

    ``logprob`` is the log-probability of ``token`` in this row. The others are computed relative to
    it.
    """
    count = min(count, len(logits))
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= threshold)
    best = ids[np.lexsort((ids, -logits[ids]))][:count]
    relative = logits[best].astype(np.float64) - float(logits[token]) + logprob
    return tuple(zip(best.tolist(), relative.tolist(), strict=True))
