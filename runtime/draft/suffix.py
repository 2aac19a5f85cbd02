"""Suffix decoding: proposes the continuation of an earlier occurrence of the text's end.

After SuffixDecoding (Oliaro and others, 2024, arXiv 2411.04975). The end of the text is looked up
in a suffix tree of the text itself and in one of earlier requests' texts. The most frequent
continuation is proposed while it is likely enough. It needs no weights and no model pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from specbuild.runtime.draft.drafter import DrafterCapabilities, HostDrafterKind, HostMetric
from specbuild.runtime.draft.host_proposal import HostProposal
from specbuild.runtime.draft.suffix_cache import SuffixCache, SuffixStatistics
from specbuild.runtime.draft.suffix_confidence import Confidence
from specbuild.runtime.draft.suffix_tree import (
    Continuation,
    Matcher,
    Point,
    SuffixTree,
    continuation,
)
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState

# Number of matching suffixes to compare, the longest first: a shorter one may have a more frequent
# continuation.
_CANDIDATES = 3

_CAPABILITIES = DrafterCapabilities(
    name="suffix", reads_aux_hidden=False, gives_probabilities=True, needs_host=True
)


class _SequenceText:
    """A sequence's text, and its matches in both trees."""

    def __init__(self, max_depth: int, others: SuffixTree | None) -> None:
        self.text: list[int] = []
        self.tree = SuffixTree(max_depth)
        self.matcher = None if others is None else Matcher(others)
        # The text length at the last proposal, the proposal, and whether an earlier text gave it.
        self.proposed: tuple[int, Continuation, bool] | None = None

    def take(self, ids: np.ndarray) -> None:
        """Append the new tokens of ``ids``."""
        for token in ids[len(self.text) :].tolist():
            self.text.append(token)
            self.tree.append(token)
            if self.matcher is not None:
                self.matcher.append(token)


class SuffixDrafter:
    """Proposes chains within the limits of ``record``."""

    capabilities = _CAPABILITIES

    def __init__(self, record: SuffixRecord) -> None:
        self._record = record
        self.statistics = SuffixStatistics()
        self._confidence = Confidence()
        self._cache = SuffixCache(record.cache_max_depth, record.cached_tokens, self.statistics)
        self._texts: dict[int, _SequenceText] = {}

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Do nothing: tokens are read at the next proposal."""

    def propose_chains(
        self, sequences: Sequence[SequenceState], limits: Sequence[int]
    ) -> HostProposal:
        """See :class:`HostProposer`: the best continuation of each text."""
        tokens, cumulative_probs = [], []
        for sequence, max_length in zip(sequences, limits, strict=True):
            found, probabilities = self._best(sequence, min(max_length, self._record.max_tokens))
            tokens.append(found.tokens)
            cumulative_probs.append(probabilities)
        return HostProposal(tokens, tuple(cumulative_probs))

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return chains up to the shape's depth, while they are likely enough."""
        depth = min(shape.draft_depth, shape.draft_tokens)
        proposal = self.propose_chains(sequences, [depth] * len(sequences))
        return proposal.trees(
            [s.root for s in sequences],
            [len(probabilities) for probabilities in proposal.cumulative_probs],
        )

    def record_result(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """See :class:`HostProposer`."""
        counted = self.statistics
        for sequence, depth, right in zip(sequences, depths, accepted, strict=True):
            counted.proposed_tokens += depth
            counted.accepted_tokens += right
            state = self._texts.get(sequence.index)
            if state is not None and state.proposed and state.proposed[2]:
                counted.cached_proposed_tokens += depth
                counted.cached_accepted_tokens += right

    def release(self, sequence: SequenceState) -> None:
        """Discard the sequence; the text of a finished one is stored for later requests."""
        state = self._texts.pop(sequence.index, None)
        if state is not None and sequence.finish_reason is not None:
            self._learn_from_output(state, sequence)
            text = sequence.ids[: sequence.num_tokens].tolist()
            self._cache.add(sequence.request.params.cache_salt, text)

    def _best(
        self, sequence: SequenceState, max_length: int
    ) -> tuple[Continuation, tuple[float, ...]]:
        """Return the continuation with the most expected tokens, and its probabilities."""
        state = self._updated(sequence)
        best, from_cache = Continuation([], [], 0), False
        cumulative_probs: tuple[float, ...] = ()
        for point, others in self._points(state):
            found = continuation(point, state.tree.text, max_length)
            probabilities = self._confidence.cumulative(
                found.shares, found.matched, self._record.min_token_prob
            )
            if sum(probabilities) > sum(cumulative_probs):
                best, cumulative_probs, from_cache = found, probabilities, others
        state.proposed = (len(state.text), best, from_cache) if cumulative_probs else None
        return best, cumulative_probs

    def _points(self, state: _SequenceText) -> list[tuple[Point, bool]]:
        found = [(point, False) for point in islice(state.tree.points, _CANDIDATES)]
        if state.matcher is not None:
            found += [(point, True) for point in islice(state.matcher.points(), _CANDIDATES)]
        return found

    def _updated(self, sequence: SequenceState) -> _SequenceText:
        state = self._texts.get(sequence.index)
        if state is None:
            others = self._cache.tree(sequence.request.params.cache_salt)
            state = _SequenceText(self._record.cache_max_depth, others)
            self._texts[sequence.index] = state
        self._learn_from_output(state, sequence)
        state.take(sequence.ids[: sequence.num_tokens])
        return state

    def _learn_from_output(self, state: _SequenceText, sequence: SequenceState) -> None:
        """Compare the last proposal with the emitted tokens, whether it was verified or not."""
        if state.proposed is None or sequence.num_tokens == state.proposed[0]:
            return
        at, found, _ = state.proposed
        state.proposed = None
        emitted = sequence.ids[at : min(sequence.num_tokens, at + len(found.tokens))].tolist()
        right = [a == b for a, b in zip(found.tokens, emitted, strict=False)]
        self._confidence.learn(found.shares, found.matched, right)


SUFFIX = HostDrafterKind(
    _CAPABILITIES,
    SuffixDrafter,
    metrics=(
        HostMetric(
            "specbuild:suffix_proposed_tokens", "proposed_tokens", "Tokens that were proposed."
        ),
        HostMetric(
            "specbuild:suffix_accepted_tokens", "accepted_tokens", "Those that were accepted."
        ),
        HostMetric(
            "specbuild:suffix_cache_proposed_tokens",
            "cached_proposed_tokens",
            "Tokens that texts of earlier requests proposed.",
        ),
        HostMetric(
            "specbuild:suffix_cache_accepted_tokens", "cached_accepted_tokens", "Those accepted."
        ),
        HostMetric(
            "specbuild:suffix_cache_evicted_tokens", "evicted_tokens", "Tokens of texts let go."
        ),
        HostMetric(
            "specbuild:suffix_cache_tokens",
            "kept_tokens",
            "Tokens of earlier requests' texts that are kept.",
            is_gauge=True,
        ),
    ),
)
