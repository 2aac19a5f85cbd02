"""Acceptance probabilities of proposed tokens, by the length of the match and the share."""

from __future__ import annotations

from collections.abc import Sequence

# Weight of the prior in observations, and the decay per observation.
PRIOR_WEIGHT = 8.0
DECAY = 0.995
# Classes of matched lengths, 1, 2-3, 4-7, … tokens, and of the share of times that a token
# followed.
_LENGTHS = 8
_SHARES = (0.5, 0.8, 1.0)


class Confidence:
    """Estimates the probability that a proposed token is accepted, if those before it are.

    A token that followed m matched tokens in a share c of all occurrences has the prior
    c · m / (m + 1): after one token nearly anything may follow, after twenty it hardly varies.
    Results of earlier proposals with a similar m and c correct the prior. Proposed tokens count as
    matched for those after them.
    """

    def __init__(self) -> None:
        classes = _LENGTHS * (len(_SHARES) + 1)
        self._hits = [0.0] * classes
        self._expected_hits = [0.0] * classes

    def cumulative(
        self, shares: Sequence[float], matched: int, minimum: float
    ) -> tuple[float, ...]:
        """Return the cumulative probabilities of a proposal while they are at least ``minimum``."""
        cumulative_probs, probability = [], 1.0
        for i, share in enumerate(shares):
            length = matched + i
            place = _class(length, share)
            ratio = (self._hits[place] + PRIOR_WEIGHT) / (self._expected_hits[place] + PRIOR_WEIGHT)
            probability *= min(1.0, share * length / (length + 1) * ratio)
            if probability < minimum:
                break
            cumulative_probs.append(probability)
        return tuple(cumulative_probs)

    def learn(self, shares: Sequence[float], matched: int, right: Sequence[bool]) -> None:
        """Count the result of a proposal's first tokens, up to the first wrong one.

        Proposals that were not verified count as well, by comparison with the emitted tokens.
        """
        for i, is_right in enumerate(right):
            length, share = matched + i, shares[i]
            place = _class(length, share)
            self._hits[place] = DECAY * self._hits[place] + is_right
            self._expected_hits[place] = DECAY * self._expected_hits[place] + share * length / (
                length + 1
            )
            if not is_right:
                return


def _class(length: int, share: float) -> int:
    by_share = sum(share >= edge for edge in _SHARES)
    return min(length.bit_length() - 1, _LENGTHS - 1) * (len(_SHARES) + 1) + by_share
