"""Draft tokens that are drawn with the noise of the target's own samples.

The target's token at a row is argmax_v (log p_v / T + noise_v), and the noise depends on (seed,
position, token) only. A draft model that adds the same noise to its log-probabilities log q
proposes the same token with probability

    Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x) ≥ (1 − TV) / (1 + TV),

where TV is the total variation distance of the two distributions (Daliri, Musco and Suresh, arXiv
2408.07978). Without the noise it proposes argmax q, which a sample often is not. The target's
choice does not depend on the draft, so the tokens of a request do not change.

Let the target's perturbed scores differ from those of the draft by errors with a Gumbel
distribution of scale β. Then the target chooses x with probability softmax(u / β)_x, given the
draft's perturbed scores u. On the example models this chance is calibrated for β = 1 to 1.2; β is
1 here. Trees select their nodes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import MASKED, SamplingParams

# Noise is added to this number of the most likely tokens of a row. Others are rarely drawn, and a
# draft predicts them badly.
CANDIDATES = 64
# Temperature of the draft over that of the request: drafts are flatter than their targets. 0.7
# gives the most tokens per step for two trained drafts at temperatures from 0.6 to 1, within 0.1 %
# of the best ratio of each (benchmarks/sampling_rules.py).
TEMPERATURE_RATIO = np.float32(0.7)

# A token of this probability is proposed without noise.
CERTAIN = 0.98

_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)[:, None, None]
# The keys of Philox4x32-10 increase by these in each round, modulo 2^32.
_KEY_STEPS = np.outer(np.arange(10), [0x9E3779B9, 0xBB67AE85]).astype(np.uint64)[:, :, None, None]


def gumbel_noise(seed: np.ndarray, position: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the noise of ``tokens`` [R, C] at ``position`` [R] with ``seed`` [R], fp32 [R, C].

    It is the noise of the op Choose (docs/developers/contracts.md#accepting).
    """
    even = np.zeros((2, *tokens.shape), np.uint64)
    odd = np.zeros_like(even)
    even[0] = position[:, None]
    odd[0] = tokens >> 2
    keys = np.zeros((2, len(seed), 1), np.uint64)
    keys[0] = seed[:, None]
    for key in (keys + _KEY_STEPS) & _WORD:
        product = even * _MULTIPLIERS
        even = (product >> _HALF)[::-1] ^ odd ^ key
        odd = (product & _WORD)[::-1]
    bits = np.choose(tokens & 3, (even[0], odd[0], even[1], odd[1]))
    u = ((bits >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: np.ndarray = -np.log(-np.log(u))
    return noise


@dataclass(frozen=True)
class SharedNoise:
    """How rows of draft logits are sampled: ``params`` and ``position``, an entry for each row.

    ``position`` [R] is the position of the row's node in the target, where the proposed token is
    verified.
    """

    params: tuple[SamplingParams, ...]
    position: np.ndarray

    @classmethod
    def of_levels(
        cls, sequences: Sequence[SequenceState], levels: Sequence[int]
    ) -> SharedNoise | None:
        """Return the noise of rows that draft ``levels`` (1, 2, …) of each sequence in turn.

        Return None if all sequences are greedy.
        """
        params = [s.request.params.sampling for s in sequences]
        if not any(p.temperature > 0 for p in params):
            return None
        roots = np.array([s.num_tokens - 1 for s in sequences], np.int32)
        position = roots[:, None] + (np.array(levels, np.int32) - 1)
        return cls(tuple(p for p in params for _ in levels), position.reshape(-1))

    def children(
        self, tokens: np.ndarray, log_q: np.ndarray, score: np.ndarray, top_k: int
    ) -> dict[str, np.ndarray]:
        """Return the outputs of the role ``expand`` for nodes with ``score`` [B, F].

        ``tokens`` and ``log_q`` are those of :meth:`best`, for rows in the order of the nodes. A
        chain has no scores.
        """
        if top_k == 1 and score.shape[1] == 1:
            return {"tokens": self.first(tokens, log_q).reshape(score.shape)}
        best, log_chance = self.best(tokens, log_q, top_k)
        scores = (score.reshape(-1, 1) + log_chance).reshape(len(score), -1)
        frontier = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        return {
            "tokens": best.reshape(len(score), -1),
            "scores": scores,
            "frontier": frontier.astype(np.int32),
        }

    def best(
        self, tokens: np.ndarray, log_q: np.ndarray, top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ``top_k`` best tokens of each row, and the logarithms of their chances.

        ``tokens`` int32 [R, C] are the most likely target tokens of each row, in descending order
        of their log-probabilities ``log_q`` fp32 [R, C]. Greedy rows keep this order and these
        values. In other rows a token is the better the higher its perturbed score, and its chance
        is that of acceptance.
        """
        rows = _row_parameters(self.params)
        score = self._perturbed(tokens, log_q, rows)
        score -= score.max(axis=1, keepdims=True)
        score -= np.log(np.exp(score).sum(axis=1, keepdims=True))
        score = np.where(rows.is_sampled, np.minimum(score, 0), log_q)
        order = np.argsort(-score, axis=1, kind="stable")[:, :top_k]
        return np.take_along_axis(tokens, order, axis=1), np.take_along_axis(score, order, axis=1)

    def first(self, tokens: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        """Return the best token of each row, [R]: the first of :meth:`best`.

        The most likely token is returned without noise if it is nearly certain in every row.
        """
        rows = _row_parameters(self.params)
        if (log_q[:, :1] >= rows.certain).all():
            return tokens[:, 0]
        score = np.where(rows.is_sampled, self._perturbed(tokens, log_q, rows), log_q)
        return tokens[np.arange(len(tokens)), score.argmax(axis=1)]

    def _perturbed(self, tokens: np.ndarray, log_q: np.ndarray, rows: _RowParameters) -> np.ndarray:
        noise = gumbel_noise(rows.seed, self.position, tokens)
        score: np.ndarray = log_q / (TEMPERATURE_RATIO * rows.divisor) + noise
        if rows.cuts:
            score[~_kept(log_q / rows.divisor, rows)] = MASKED
        return score


@dataclass(frozen=True)
class _RowParameters:
    """Columns [R, 1] of the parameters of rows, and ``seed`` [R]. ``cuts``: some row has a cut.

    ``divisor`` is the temperature, 1 for greedy rows. ``certain`` is the log-probability from which
    a token is nearly certain at the temperature of the row, −∞ for greedy rows.
    """

    is_sampled: np.ndarray
    divisor: np.ndarray
    certain: np.ndarray
    seed: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    cuts: bool


@lru_cache(maxsize=256)
def _row_parameters(params: tuple[SamplingParams, ...]) -> _RowParameters:
    temperature = np.array([[p.temperature] for p in params], np.float32)
    is_sampled = temperature > 0
    divisor = np.where(is_sampled, temperature, np.float32(1))
    return _RowParameters(
        is_sampled=is_sampled,
        divisor=divisor,
        certain=np.where(
            is_sampled, np.log(CERTAIN) * np.minimum(temperature, 1 / divisor), -np.inf
        ),
        seed=np.array([p.noise_seed for p in params], np.int32),
        min_p=np.array([[p.min_p] for p in params], np.float32),
        top_k=np.array([[p.top_k] for p in params], np.int32),
        top_p=np.array([[p.top_p] for p in params], np.float32),
        cuts=any(p.cuts for p in params),
    )


def _kept(scaled: np.ndarray, rows: _RowParameters) -> np.ndarray:
    """Return which tokens min-p, then top-k, then top-p keep, bool [R, C]."""
    columns = np.arange(scaled.shape[1])
    share = np.exp(scaled - scaled[:, :1])
    kept = share >= rows.min_p
    kept &= columns < np.where(rows.top_k > 0, rows.top_k, scaled.shape[1])
    mass = np.where(kept, share, 0)
    before = np.cumsum(mass, axis=1) - mass
    kept &= before < rows.top_p * mass.sum(axis=1, keepdims=True)
    kept[:, 0] = True
    return kept
