"""How far one engine's distributions are from another's, over the same text.

Both give logits for the token behind each token of the text. Of row t with the distributions
p = softmax(reference) and q = softmax(other), and the text's next token x:

- loss: −ln p(x) and −ln q(x); a perplexity is the exponential of the mean loss
- divergence: KL(p‖q) = Σ_v p(v) (ln p(v) − ln q(v)), in nats
- agreement: whether both have the largest logit at the same token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Rows whose distributions are held in fp64 at once.
_ROWS = 16


@dataclass(frozen=True)
class Fidelity:
    """Means over ``tokens`` rows.

    ``perplexity_ratio`` is the other's over the reference's, ``perplexity_ratio_error`` its
    standard error, from the losses' differences row by row, taken as independent. Divergences are
    in nats a token: the mean, that which 99 of 100 rows do not pass, and the largest.
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
    """Collects rows; :meth:`result` sums them up."""

    def __init__(self) -> None:
        self._loss: list[np.ndarray] = []
        self._loss_other: list[np.ndarray] = []
        self._divergence: list[np.ndarray] = []
        self._agrees: list[np.ndarray] = []

    def add(self, reference: np.ndarray, other: np.ndarray, following: np.ndarray) -> None:
        """Logits [n, V] of both, and the token behind each row, int [n]."""
        for start in range(0, len(following), _ROWS):
            part = slice(start, start + _ROWS)
            self._add(reference[part], other[part], following[part])

    def _add(self, reference: np.ndarray, other: np.ndarray, following: np.ndarray) -> None:
        log_p, log_q = log_softmax(reference), log_softmax(other)
        rows = np.arange(len(following))
        self._loss.append(-log_p[rows, following])
        self._loss_other.append(-log_q[rows, following])
        # What p gives no probability counts nothing, whatever q says of it.
        with np.errstate(invalid="ignore"):
            terms = np.where(log_p == -np.inf, 0.0, np.exp(log_p) * (log_p - log_q))
        self._divergence.append(np.maximum(terms.sum(axis=1), 0.0))
        self._agrees.append(reference.argmax(axis=1) == other.argmax(axis=1))

    @property
    def divergence(self) -> np.ndarray:
        """KL(p‖q) of every row so far, in nats, fp64 [tokens]."""
        return np.concatenate(self._divergence)

    def result(self) -> Fidelity:
        """Raises ValueError where there are no rows."""
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
    """Natural log-probabilities of logits [n, V], fp64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
