"""How far a match can be trusted: what came true of proposals, by match and by share."""

from __future__ import annotations

from collections.abc import Sequence

# Pseudo-observations of what is believed before the first one, and how fast all fade.
PRIOR_WEIGHT = 8.0
DECAY = 0.995
# Classes of matched lengths, 1, 2-3, 4-7, … tokens, and of the share of times that a token
# followed.
_LENGTHS = 8
_SHARES = (0.5, 0.8, 1.0)


class Confidence:
    """The chance that a proposed token is right, where those before it were.

    A token that followed m matched ones in a share c of all times is believed to be right with
    c · m / (m + 1): behind one token nearly anything may follow, behind twenty hardly. What came
    true in its class of m and c corrects that. The proposals' own tokens count as matched.
    """

    def __init__(self) -> None:
        classes = _LENGTHS * (len(_SHARES) + 1)
        self._hits = [0.0] * classes
        self._expected_hits = [0.0] * classes

    def cumulative(
        self, shares: Sequence[float], matched: int, minimum: float
    ) -> tuple[float, ...]:
        """The chance of each token and all before it, as far as it is ``least`` at least."""
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
        """Of a proposal's first tokens these were ``right``; what follows a wrong one says nothing.

        Proposals that were not taken count as well: what was emitted tells what they were worth.
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
