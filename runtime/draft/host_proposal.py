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
class ProposedDepths:
    """A choice of an offer: of sequence b the first ``depths[b]`` tokens that are proposed."""

    depths: tuple[int, ...]

    @property
    def draft_depth(self) -> int:
        """Levels of the longest chain."""
        return max(self.depths)


class WaitForTokens(Enum):
    """A choice of the next step once the tokens in flight are known: an offer follows them."""

    WAIT_FOR_TOKENS = "later"


WAIT_FOR_TOKENS: Final = WaitForTokens.WAIT_FOR_TOKENS


@dataclass(frozen=True, slots=True)
class HostProposal:
    """A chain for each sequence: ``tokens[b]``, of which token i is accepted with ``reach[b][i]``.

    The chances are those of a token and all before it, so they fall along a chain.
    """

    tokens: Sequence[Sequence[int]]
    cumulative_probs: tuple[tuple[float, ...], ...]

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> DraftTrees:
        """The first tokens of each chain below the roots, as trees."""
        max_length = max(depths)
        if max_length == 0:
            return chain_trees(roots)
        padded = np.zeros((len(roots), max_length), np.int32)
        for b, depth in enumerate(depths):
            padded[b, :depth] = self.tokens[b][:depth]
        trees = chain_trees(roots, padded)
        return trees if min(depths) == max_length else trees.cut(depths)


class HostProposer(Protocol):
    """A drafter that proposes on the host, cheaply, and says how likely its tokens are."""

    def propose_chains(
        self, sequences: Sequence[SequenceState], limits: Sequence[int]
    ) -> HostProposal:
        """What it proposes for the next step, ``limits[b]`` tokens of sequence b at most."""
        ...

    def record_result(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Of the offer ``depths[b]`` tokens were verified, and ``accepted[b]`` of them accepted."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done, or its generation was closed."""
        ...
