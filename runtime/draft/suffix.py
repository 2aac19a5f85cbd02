"""Suffix decoding: find earlier occurrences of the last tokens and propose what followed them.

The method is that of SuffixDecoding (Oliaro and others, 2024, arXiv 2411.04975). Two suffix trees
are searched for the last tokens. The first holds the text itself, the second the texts of earlier
requests. The most frequent continuation is proposed, up to the first token whose probability is too
low. The method needs no weights and no model pass.
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

# Number of matching suffixes to compare, the longest first. A shorter suffix may have a more
# frequent continuation.
_CANDIDATES = 3

_CAPABILITIES = DrafterCapabilities(
    name="suffix", reads_aux_hidden=False, gives_probabilities=True, needs_host=True
)


class _SequenceText:
    """A sequence's text, and its matches in both trees."""

    def __init__(self, max_depth: int, cached: SuffixTree | None) -> None:
        self.text: list[int] = []
        self.tree = SuffixTree(max_depth)
        self.matcher = None if cached is None else Matcher(cached)
        # The last proposal: the text length at that time, the continuation, and whether it came
        # from the text of an earlier request.
        self.proposed: tuple[int, Continuation, bool] | None = None

    def append_new(self, ids: np.ndarray) -> None:
        """Append the tokens of ``ids`` that the text does not have yet."""
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
            best, probabilities = self._best(sequence, min(max_length, self._record.max_tokens))
            tokens.append(best.tokens)
            cumulative_probs.append(probabilities)
        return HostProposal(tokens, tuple(cumulative_probs))

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return chains up to the shape's depth, each cut where its probability is too low."""
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
        statistics = self.statistics
        for sequence, depth, num_accepted in zip(sequences, depths, accepted, strict=True):
            statistics.proposed_tokens += depth
            statistics.accepted_tokens += num_accepted
            state = self._texts.get(sequence.index)
            if state is not None and state.proposed and state.proposed[2]:
                statistics.cached_proposed_tokens += depth
                statistics.cached_accepted_tokens += num_accepted

    def release(self, sequence: SequenceState) -> None:
        """Discard the sequence's state, but store the text of a finished sequence."""
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
        for point, is_cached in self._points(state):
            candidate = continuation(point, state.tree.text, max_length)
            probabilities = self._confidence.cumulative(
                candidate.shares, candidate.matched, self._record.min_token_prob
            )
            if sum(probabilities) > sum(cumulative_probs):
                best, cumulative_probs, from_cache = candidate, probabilities, is_cached
        state.proposed = (len(state.text), best, from_cache) if cumulative_probs else None
        return best, cumulative_probs

    def _points(self, state: _SequenceText) -> list[tuple[Point, bool]]:
        """Return the longest matches, and whether each is in the tree of earlier requests."""
        points = [(point, False) for point in islice(state.tree.points, _CANDIDATES)]
        if state.matcher is not None:
            points += [(point, True) for point in islice(state.matcher.points(), _CANDIDATES)]
        return points

    def _updated(self, sequence: SequenceState) -> _SequenceText:
        state = self._texts.get(sequence.index)
        if state is None:
            cached = self._cache.tree(sequence.request.params.cache_salt)
            state = _SequenceText(self._record.cache_max_depth, cached)
            self._texts[sequence.index] = state
        self._learn_from_output(state, sequence)
        state.append_new(sequence.ids[: sequence.num_tokens])
        return state

    def _learn_from_output(self, state: _SequenceText, sequence: SequenceState) -> None:
        """Compare the last proposal with the emitted tokens, even if it was not verified."""
        if state.proposed is None or sequence.num_tokens == state.proposed[0]:
            return
        start, proposal, _ = state.proposed
        state.proposed = None
        emitted = sequence.ids[
            start : min(sequence.num_tokens, start + len(proposal.tokens))
        ].tolist()
        matches = [a == b for a, b in zip(proposal.tokens, emitted, strict=False)]
        self._confidence.learn(proposal.shares, proposal.matched, matches)


SUFFIX = HostDrafterKind(
    _CAPABILITIES,
    SuffixDrafter,
    metrics=(
        HostMetric("specbuild:suffix_proposed_tokens", "proposed_tokens", "Proposed tokens."),
        HostMetric(
            "specbuild:suffix_accepted_tokens",
            "accepted_tokens",
            "Accepted tokens of all proposals.",
        ),
        HostMetric(
            "specbuild:suffix_cache_proposed_tokens",
            "cached_proposed_tokens",
            "Proposed tokens from texts of earlier requests.",
        ),
        HostMetric(
            "specbuild:suffix_cache_accepted_tokens",
            "cached_accepted_tokens",
            "Accepted tokens from texts of earlier requests.",
        ),
        HostMetric(
            "specbuild:suffix_cache_evicted_tokens", "evicted_tokens", "Tokens of evicted texts."
        ),
        HostMetric(
            "specbuild:suffix_cache_tokens",
            "kept_tokens",
            "Stored tokens of texts of earlier requests.",
            is_gauge=True,
        ),
    ),
)
