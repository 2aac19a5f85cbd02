"""Host proposals: chains for the next step, with the acceptance probability of each token."""

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
    """A choice to verify a host proposal: the first ``depths[b]`` tokens of sequence b's chain."""

    depths: tuple[int, ...]

    @property
    def draft_depth(self) -> int:
        """Levels of the longest chain."""
        return max(self.depths)


class WaitForTokens(Enum):
    """A request to choose the next step later, when the host knows the tokens in flight."""

    WAIT_FOR_TOKENS = "later"


WAIT_FOR_TOKENS: Final = WaitForTokens.WAIT_FOR_TOKENS


@dataclass(frozen=True, slots=True)
class HostProposal:
    """A chain for each sequence: ``tokens[b]``, with ``cumulative_probs[b]``.

    ``cumulative_probs[b][i]`` is the probability that token i and all tokens before it are
    accepted. So the values never rise along a chain.
    """

    tokens: Sequence[Sequence[int]]
    cumulative_probs: tuple[tuple[float, ...], ...]

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> DraftTrees:
        """Return trees with the first ``depths[b]`` tokens of chain b below ``roots[b]``."""
        max_length = max(depths)
        if max_length == 0:
            return chain_trees(roots)
        padded = np.zeros((len(roots), max_length), np.int32)
        for b, depth in enumerate(depths):
            padded[b, :depth] = self.tokens[b][:depth]
        trees = chain_trees(roots, padded)
        return trees if min(depths) == max_length else trees.cut(depths)


class HostProposer(Protocol):
    """A drafter that proposes chains on the host and estimates their acceptance."""

    def propose_chains(
        self, sequences: Sequence[SequenceState], limits: Sequence[int]
    ) -> HostProposal:
        """Propose up to ``limits[b]`` tokens for the next step of sequence b."""
        ...

    def record_result(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Record a step that accepted ``accepted[b]`` of ``depths[b]`` verified tokens."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Discard the state of a finished or closed sequence."""
        ...
