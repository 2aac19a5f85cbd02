"""Suffix decoding: proposes what followed last time, in this text or in earlier ones.

After SuffixDecoding (Oliaro and others, 2024, arXiv 2411.04975): a suffix tree of the text so far,
and one of earlier requests' texts, are searched for what the text ends with. The continuation
that was most frequent is proposed, as far as it is likely. No weights, no pass of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from specbuild.runtime.draft.confidence import Confidence
from specbuild.runtime.draft.drafter import DrafterCapabilities, HostDrafterKind, HostMetric
from specbuild.runtime.draft.offer import Offer
from specbuild.runtime.draft.suffix_cache import SuffixCache, SuffixStatistics
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

# Of the suffixes that stood before, the longest ones are weighed: a shorter one may have been
# followed by one token more often.
_WEIGHED = 3

_CAPABILITIES = DrafterCapabilities(
    name="suffix", reads_aux_hidden=False, gives_probabilities=True, needs_host=True
)


class _Following:
    """A sequence's text, and where it stands in both trees."""

    def __init__(self, max_depth: int, others: SuffixTree | None) -> None:
        self.text: list[int] = []
        self.tree = SuffixTree(max_depth)
        self.matcher = None if others is None else Matcher(others)
        # What was proposed behind so many tokens, and whether another text gave it.
        self.proposed: tuple[int, Continuation, bool] | None = None

    def take(self, ids: np.ndarray) -> None:
        """Follows the sequence to the end of ``ids``."""
        for token in ids[len(self.text) :].tolist():
            self.text.append(token)
            self.tree.append(token)
            if self.matcher is not None:
                self.matcher.append(token)


class SuffixDrafter:
    """Proposes chains; ``record`` bounds them."""

    capabilities = _CAPABILITIES

    def __init__(self, record: SuffixRecord) -> None:
        self._record = record
        self.statistics = SuffixStatistics()
        self._confidence = Confidence()
        self._cache = SuffixCache(record.cache_max_depth, record.cached_tokens, self.statistics)
        self._following: dict[int, _Following] = {}

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Nothing: tokens are taken up when they are wanted."""

    def offer(self, sequences: Sequence[SequenceState], most: Sequence[int]) -> Offer:
        """The likeliest continuation of each text, as far as it is likely enough."""
        tokens, reach = [], []
        for sequence, longest in zip(sequences, most, strict=True):
            found, chances = self._best(sequence, min(longest, self._record.max_tokens))
            tokens.append(found.tokens)
            reach.append(chances)
        return Offer(tokens, tuple(reach))

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Chains as long as they are likely, up to the shape's depth."""
        depth = min(shape.draft_depth, shape.draft_tokens)
        offer = self.offer(sequences, [depth] * len(sequences))
        return offer.trees([s.root for s in sequences], [len(chances) for chances in offer.reach])

    def taken(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Counts what became of an offer."""
        counted = self.statistics
        for sequence, depth, right in zip(sequences, depths, accepted, strict=True):
            counted.proposed_tokens += depth
            counted.accepted_tokens += right
            following = self._following.get(sequence.index)
            if following is not None and following.proposed and following.proposed[2]:
                counted.cached_proposed_tokens += depth
                counted.cached_accepted_tokens += right

    def release(self, sequence: SequenceState) -> None:
        """Forgets the sequence; the text of one that came to its end is kept for others."""
        following = self._following.pop(sequence.index, None)
        if following is not None and sequence.finish_reason is not None:
            self._settle(following, sequence)
            text = sequence.ids[: sequence.num_tokens].tolist()
            self._cache.add(sequence.request.params.cache_salt, text)

    def _best(
        self, sequence: SequenceState, longest: int
    ) -> tuple[Continuation, tuple[float, ...]]:
        """The continuation that promises most tokens, and the chances of its tokens."""
        following = self._followed(sequence)
        best, of_others = Continuation([], [], 0), False
        reach: tuple[float, ...] = ()
        for point, others in self._points(following):
            found = continuation(point, following.tree.text, longest)
            chances = self._confidence.reach(
                found.shares, found.matched, self._record.min_token_prob
            )
            if sum(chances) > sum(reach):
                best, reach, of_others = found, chances, others
        following.proposed = (len(following.text), best, of_others) if reach else None
        return best, reach

    def _points(self, following: _Following) -> list[tuple[Point, bool]]:
        found = [(point, False) for point in islice(following.tree.points, _WEIGHED)]
        if following.matcher is not None:
            found += [(point, True) for point in islice(following.matcher.points(), _WEIGHED)]
        return found

    def _followed(self, sequence: SequenceState) -> _Following:
        following = self._following.get(sequence.index)
        if following is None:
            others = self._cache.tree(sequence.request.params.cache_salt)
            following = _Following(self._record.cache_max_depth, others)
            self._following[sequence.index] = following
        self._settle(following, sequence)
        following.take(sequence.ids[: sequence.num_tokens])
        return following

    def _settle(self, following: _Following, sequence: SequenceState) -> None:
        """Learns of what was emitted behind the last proposal, whether it was taken or not."""
        if following.proposed is None or sequence.num_tokens == following.proposed[0]:
            return
        at, found, _ = following.proposed
        following.proposed = None
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
