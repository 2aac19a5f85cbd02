"""Measures an engine's stages against the reference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specbuild.builder.verify.report import VerifyRow
from specbuild.runtime.measure.losslessness import NEAR_TIE

# Two experts whose router logits are closer than this may be exchanged. Another expert's output has
# any distance, and every later row reads it, so later values may differ arbitrarily.
ROUTING_TIE = 1e-5

MIN_COSINE = 0.9999
LARGEST_ERROR = 1e-3
TOP_K = 5
# Replaces values that are not finite, in a report that must be valid JSON.
WORST_COSINE, WORST_ERROR = -1.0, float(np.finfo(np.float32).max)


class Comparison:
    """Collects pairs of rows by stage, in the order in which stages first appear."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._logits: set[str] = set()

    def states(self, got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        """Add hidden states [n, H] of each stage in ``expected``."""
        for stage, rows in expected.items():
            self._pairs.setdefault(stage, []).append((got[stage], rows))

    def logits(self, stage: str, got: np.ndarray, expected: np.ndarray) -> None:
        """Add logits [n, V] of a stage."""
        self._logits.add(stage)
        self._pairs.setdefault(stage, []).append((got, expected))

    def rows(self) -> tuple[VerifyRow, ...]:
        """Return one row per stage."""
        return tuple(
            measure(
                stage,
                np.concatenate([got for got, _ in pairs]),
                np.concatenate([expected for _, expected in pairs]),
                logits=stage in self._logits,
            )
            for stage, pairs in self._pairs.items()
        )


def measure(stage: str, got: np.ndarray, expected: np.ndarray, *, logits: bool) -> VerifyRow:
    """Rows ``got`` against ``expected``, both [n, width]; values that are not finite fail."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Values that are not finite fail every threshold below.
        cosine = float(_cosine(got, expected).min())
        difference = np.abs(got - expected).max(axis=1)
    if not logits:
        difference /= np.maximum(np.abs(expected).max(axis=1), np.finfo(np.float32).tiny)
    error = float(difference.max())
    if not (np.isfinite(cosine) and np.isfinite(error)):
        cosine, error = WORST_COSINE, WORST_ERROR
    close = cosine >= MIN_COSINE and error <= LARGEST_ERROR
    kind = "error" if logits else "relative error"
    threshold = f"cosine ≥ {MIN_COSINE}, {kind} ≤ {LARGEST_ERROR:g}"
    if not logits:
        return VerifyRow(stage, len(got), cosine, error, None, None, threshold, close)
    agree = got.argmax(axis=1) == expected.argmax(axis=1)
    excused = _margin(expected) < NEAR_TIE
    return VerifyRow(
        stage=stage,
        rows=len(got),
        cosine=cosine,
        max_error=error,
        argmax_agreement=float(agree.mean()),
        topk_agreement=_top_k_agreement(got, expected),
        threshold=f"{threshold}, argmax equal where the margin is ≥ {NEAR_TIE:g}",
        passed=close and bool((agree | excused).all()),
    )


def _cosine(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    return (got * expected).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)


def _margin(logits: np.ndarray) -> np.ndarray:
    """Return top-1 minus top-2 of each row."""
    best = np.partition(logits, -2, axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


def _top_k_agreement(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the share of the reference's best ids that are among the engine's."""
    k = min(TOP_K, got.shape[1])
    best = [np.argpartition(-rows, k - 1, axis=1)[:, :k] for rows in (got, expected)]
    shared = (best[0][:, :, None] == best[1][:, None, :]).any(axis=1)
    return float(shared.mean())
