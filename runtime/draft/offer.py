"""Tokens that the host proposes before a step, with the chance that each is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np

from specbuild.runtime.draft.tree import DraftTrees, chain_trees
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True, slots=True)
class OfferedDepths:
    """A choice of an offer: of sequence b the first ``depths[b]`` tokens that are proposed."""

    depths: tuple[int, ...]

    @property
    def draft_depth(self) -> int:
        """Levels of the longest chain."""
        return max(self.depths)


class Later(Enum):
    """A choice of the next step once the tokens in flight are known: an offer follows them."""

    LATER = "later"


LATER: Final = Later.LATER


@dataclass(frozen=True, slots=True)
class Offer:
    """A chain for each sequence: ``tokens[b]``, of which token i is accepted with ``reach[b][i]``.

    The chances are those of a token and all before it, so they fall along a chain.
    """

    tokens: Sequence[Sequence[int]]
    reach: tuple[tuple[float, ...], ...]

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> DraftTrees:
        """The first tokens of each chain below the roots, as trees."""
        longest = max(depths)
        if longest == 0:
            return chain_trees(roots)
        padded = np.zeros((len(roots), longest), np.int32)
        for b, depth in enumerate(depths):
            padded[b, :depth] = self.tokens[b][:depth]
        trees = chain_trees(roots, padded)
        return trees if min(depths) == longest else trees.cut(depths)


class Offers(Protocol):
    """A drafter that proposes on the host, cheaply, and says how likely its tokens are."""

    def offer(self, sequences: Sequence[SequenceState], most: Sequence[int]) -> Offer:
        """What it proposes for the next step, ``most[b]`` tokens of sequence b at most."""
        ...

    def taken(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Of the offer ``depths[b]`` tokens were verified, and ``accepted[b]`` of them accepted."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done, or its generation was closed."""
        ...
