"""Acceptance probabilities of proposed tokens, by length of the match and share of occurrences."""

from __future__ import annotations

from collections.abc import Sequence

# Weight of the prior, in observations.
PRIOR_WEIGHT = 8.0
# Decay of the counts per observation.
DECAY = 0.995
# Number of classes of matched lengths: 1, 2-3, 4-7, … tokens.
_LENGTHS = 8
# Boundaries between the classes of the share of occurrences.
_SHARES = (0.5, 0.8, 1.0)


class Confidence:
    """Estimates the probability that a proposed token is accepted if all tokens before it are.

    Let c be the share of occurrences of m matched tokens in which this token followed. The prior is
    c · m / (m + 1), since a longer match predicts the next token better. Results of earlier
    proposals with similar m and c correct the prior. For a later token of a proposal, m includes
    the proposed tokens before it.
    """

    def __init__(self) -> None:
        classes = _LENGTHS * (len(_SHARES) + 1)
        self._hits = [0.0] * classes
        self._expected_hits = [0.0] * classes

    def cumulative(
        self, shares: Sequence[float], matched: int, minimum: float
    ) -> tuple[float, ...]:
        """Return the cumulative probabilities of a proposal that are at least ``minimum``."""
        cumulative_probs, probability = [], 1.0
        for i, share in enumerate(shares):
            length = matched + i
            number = _class_number(length, share)
            ratio = (self._hits[number] + PRIOR_WEIGHT) / (
                self._expected_hits[number] + PRIOR_WEIGHT
            )
            probability *= min(1.0, share * length / (length + 1) * ratio)
            if probability < minimum:
                break
            cumulative_probs.append(probability)
        return tuple(cumulative_probs)

    def learn(self, shares: Sequence[float], matched: int, right: Sequence[bool]) -> None:
        """Count the tokens of a proposal, up to the first wrong one.

        ``right[i]`` states whether token i equals the emitted token. Proposals that were not
        verified count as well.
        """
        for i, is_right in enumerate(right):
            length, share = matched + i, shares[i]
            number = _class_number(length, share)
            self._hits[number] = DECAY * self._hits[number] + is_right
            self._expected_hits[number] = DECAY * self._expected_hits[number] + share * length / (
                length + 1
            )
            if not is_right:
                return


def _class_number(length: int, share: float) -> int:
    by_share = sum(share >= edge for edge in _SHARES)
    return min(length.bit_length() - 1, _LENGTHS - 1) * (len(_SHARES) + 1) + by_share
