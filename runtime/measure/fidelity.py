"""The distance of one engine's distributions from another's, on the same text.

Both compute logits for the token after each token of the text. For row t with the distributions p =
softmax(reference) and q = softmax(other), and the text's next token x:

- loss: −ln p(x) and −ln q(x); a perplexity is the exponential of the mean loss
- divergence: KL(p
q) = Σ_v p(v) (ln p(v) − ln q(v)), in nats
- agreement: whether both have the largest logit at the same token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The number of rows whose distributions are in fp64 at once.
_ROWS = 16


@dataclass(frozen=True)
class Fidelity:
    """Means over ``tokens`` rows.

    ``perplexity_ratio`` is the other's perplexity divided by the reference's.
    ``perplexity_ratio_error`` is its standard error, from the differences of losses by row, assumed
    independent. Divergences are in nats per token: mean, 99th percentile and maximum.
    """

    tokens: int
    perplexity: float
    perplexity_other: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    divergence: float
    divergence_p99: float
    divergence_max: float
    agreement: float


class FidelityRows:
    """Collects rows; :meth:`result` computes the means."""

    def __init__(self) -> None:
        self._loss: list[np.ndarray] = []
        self._loss_other: list[np.ndarray] = []
        self._divergence: list[np.ndarray] = []
        self._agrees: list[np.ndarray] = []

    def add(self, reference: np.ndarray, other: np.ndarray, following: np.ndarray) -> None:
        """Add logits [n, V] of both, and the token after each row, int [n]."""
        for start in range(0, len(following), _ROWS):
            part = slice(start, start + _ROWS)
            self._add(reference[part], other[part], following[part])

    def _add(self, reference: np.ndarray, other: np.ndarray, following: np.ndarray) -> None:
        log_p, log_q = log_softmax(reference), log_softmax(other)
        rows = np.arange(len(following))
        self._loss.append(-log_p[rows, following])
        self._loss_other.append(-log_q[rows, following])
        # Tokens with probability 0 in p contribute 0, for any q.
        with np.errstate(invalid="ignore"):
            terms = np.where(log_p == -np.inf, 0.0, np.exp(log_p) * (log_p - log_q))
        self._divergence.append(np.maximum(terms.sum(axis=1), 0.0))
        self._agrees.append(reference.argmax(axis=1) == other.argmax(axis=1))

    @property
    def divergence(self) -> np.ndarray:
        """KL(p
        q) of every row so far, in nats, fp64 [tokens].
        """
        return np.concatenate(self._divergence)

    def result(self) -> Fidelity:
        """Return the means; ValueError if there are no rows."""
        loss, other = np.concatenate(self._loss), np.concatenate(self._loss_other)
        divergence = self.divergence
        ratio = float(np.exp((other - loss).mean()))
        # The ratio is exp of a mean: its error is that of the mean times the ratio.
        spread = float((other - loss).std(ddof=1)) if len(loss) > 1 else 0.0
        return Fidelity(
            tokens=len(loss),
            perplexity=float(np.exp(loss.mean())),
            perplexity_other=float(np.exp(other.mean())),
            perplexity_ratio=ratio,
            perplexity_ratio_error=ratio * spread / len(loss) ** 0.5,
            divergence=float(divergence.mean()),
            divergence_p99=float(np.quantile(divergence, 0.99)),
            divergence_max=float(divergence.max()),
            agreement=float(np.concatenate(self._agrees).mean()),
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return natural log-probabilities of logits [n, V], in fp64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
