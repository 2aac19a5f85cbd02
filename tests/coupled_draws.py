"""Samples of a draft and its target with shared noise, and their expected acceptance rates."""

from __future__ import annotations

import numpy as np
import torch

from specbuild.plugins_cuda.choose.op import reference as choose
from specbuild.runtime.sampling import SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def logits_pair(seed: int, error: float, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits [vocab] of a target and of a draft for it."""
    random = np.random.default_rng(seed)
    target = (2 * random.standard_normal(vocab)).astype(np.float32)
    return target, (target + error * random.standard_normal(vocab)).astype(np.float32)


def target_samples(logits: np.ndarray, params: SamplingParams, rows: int) -> np.ndarray:
    """Return the target's samples at the positions 0, 1, …, int32 [rows]."""
    choice, _ = choose(
        torch.from_numpy(np.tile(logits, (rows, 1))),
        torch.full((rows,), params.temperature),
        torch.full((rows,), params.top_k, dtype=torch.int32),
        torch.full((rows,), params.top_p),
        torch.full((rows,), params.noise_seed, dtype=torch.int32),
        torch.arange(rows, dtype=torch.int32),
        torch.full((rows,), params.floor),
    )
    return choice.numpy()


def coupled_rate(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Return Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x) over the draft's tokens x (q_x > 0)."""
    rate = 0.0
    for x in np.flatnonzero(np.isfinite(log_q)):
        rate += float(1 / np.exp(np.maximum(log_p - log_p[x], log_q - log_q[x])).sum())
    return rate


def require_distribution(samples: np.ndarray, log_q: np.ndarray) -> None:
    """Apply Pearson's test. Values expected fewer than 5 times count as one value."""
    expected = len(samples) * np.exp(log_q.astype(np.float64))
    counts = np.bincount(samples, minlength=len(log_q))
    often = expected >= 5
    rest = max(expected[~often].sum(), 1e-9)
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    statistic += (counts[~often].sum() - expected[~often].sum()) ** 2 / rest
    degrees = int(often.sum())
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)
