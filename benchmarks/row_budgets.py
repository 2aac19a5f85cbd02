"""Simulates row budgets by confidence against a depth per sequence, on measured step times.

python benchmarks/row_budgets.py [--auc 0.8] [--steps 3000]

A ragged step of T rows verifies T - B drafted tokens of B sequences. They are those with the
largest probability of acceptance: by the acceptance of each sequence, or by that and the draft's
confidence in each token. Both are known exactly here, so the gain is an upper bound. Draft tokens
are right independently of each other; the confidence of right and wrong ones is normal with equal
variance, as ``synth --confidence-auc`` has it. The step times are those of an H200 in
``results/h200-2026-11-29/ragged-steps.txt``. With ``any rows`` there are further programs, with
times on the line through the measured ones of a depth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from statistics import NormalDist, mean

import numpy as np

# By batch: microseconds of a step without a draft, and by levels and rows.
TIMES: Mapping[int, tuple[float, Mapping[tuple[int, int], float]]] = {
    4: (1963, {(3, 16): 3563, (4, 20): 4051, (7, 32): 4396, (7, 24): 4313}),
    16: (3369, {(3, 64): 4802, (4, 80): 5277, (4, 64): 4897, (7, 128): 6712, (7, 96): 6016}),
    64: (
        6224,
        {(1, 128): 8751, (2, 192): 12551, (2, 128): 12037, (3, 256): 16679, (3, 192): 15058},
    ),
}
ACCEPTANCES = ((0.4, 0.9), (0.7, 0.7))


def with_any_rows(
    batch: int, times: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Add programs of every quarter of the batch, by the mean time of a row."""
    slopes = []
    for (depth, rows), step_us in times.items():
        slopes += [
            (step_us - other_us) / (rows - fewer)
            for (d, fewer), other_us in times.items()
            if d == depth and fewer < rows
        ]
    every = dict(times)
    for (depth, rows), step_us in times.items():
        for fewer in range(batch + max(1, batch // 4), rows, max(1, batch // 4)):
            every.setdefault((depth, fewer), step_us - mean(slopes) * (rows - fewer))
    return every


class Steps:
    """Drawn steps of sequences whose acceptance is spread evenly from ``low`` to ``high``."""

    def __init__(self, batch: int, bounds: tuple[float, float], *, auc: float, count: int) -> None:
        random, depth = np.random.default_rng(0), 7
        acceptance = np.linspace(*bounds, batch)[None, :, None]
        right = random.random((count, batch, depth)) < acceptance
        distance = 2**0.5 * NormalDist().inv_cdf(auc)
        score = random.standard_normal(right.shape) + distance * right
        odds = acceptance / (1 - acceptance) * np.exp(distance * score - distance**2 / 2)
        self.accepted = np.cumprod(right, axis=2)
        self.by_confidence = np.cumprod(odds / (1 + odds), axis=2)
        by_sequence = np.cumprod(np.broadcast_to(acceptance, (1, batch, depth)), axis=2)
        self.by_sequence = np.broadcast_to(by_sequence, right.shape)

    def rate(self, survival: np.ndarray, depth: int, rows: int, step_us: float) -> float:
        """Return tokens per microsecond if the likeliest tokens by ``survival`` have rows."""
        count, batch, _ = survival.shape
        likely = survival[:, :, :depth].reshape(count, -1)
        accepted = self.accepted[:, :, :depth].reshape(count, -1)
        chosen = np.argsort(-likely, axis=1, kind="stable")[:, : rows - batch]
        emitted = batch + np.take_along_axis(accepted, chosen, axis=1).sum(axis=1)
        return float(emitted.mean()) / step_us


def main() -> None:
    """Print a JSON line for each batch and acceptance: rates over the best common chain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--auc", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    for batch, (plain_us, measured) in TIMES.items():
        for bounds in ACCEPTANCES:
            steps = Steps(batch, bounds, auc=args.auc, count=args.steps)
            programs = {"measured": measured, "any rows": with_any_rows(batch, measured)}
            for name, times in programs.items():
                common = {k: t for k, t in measured.items() if k[1] == batch * (k[0] + 1)}
                best = {
                    kind: max(
                        [batch / plain_us, *(steps.rate(by, *k, t) for k, t in of_kind.items())]
                    )
                    for kind, by, of_kind in (
                        ("common", steps.by_sequence, common),
                        ("sequence", steps.by_sequence, times),
                        ("confidence", steps.by_confidence, times),
                    )
                }
                result = {
                    "batch": batch,
                    "acceptance": bounds,
                    "programs": name,
                    "depth per sequence": round(best["sequence"] / best["common"], 3),
                    "by confidence": round(best["confidence"] / best["common"], 3),
                    "gain": round(best["confidence"] / best["sequence"], 3),
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
