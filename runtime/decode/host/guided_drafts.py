"""Drafts that keep to guides: what a grammar forces needs no guess.

Where the next bytes are forced, the mask of the target's row allows one token alone: as a draft it
is always accepted. Behind a draft that the grammar refuses nothing can be accepted, whatever stands
there. So a step's chains take forced tokens in, and where all of them would be forced from their
roots on, the draft does not run. Trees with branches stay as the draft made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.draft.tree import DraftTrees, chain_trees
from specbuild.runtime.guides.grammar import GuideState
from specbuild.runtime.request import SequenceState


def forced_chains(
    sequences: Sequence[SequenceState], *, min_tokens: int, max_tokens: int
) -> DraftTrees | None:
    """Chains of forced tokens, as long as the shortest run of them and ``most``.

    None where one of the runs is shorter than ``least`` and does not end its output, or a sequence
    has no guide.
    """
    runs = []
    for sequence in sequences:
        guide, output = sequence.guide, sequence.output
        run = [] if guide is None else guide.forced(output)
        if guide is None or not run:
            return None
        if len(run) < min_tokens and not guide.complete(np.concatenate([output, run])):
            return None
        runs.append(run)
    depth = min(max_tokens, *map(len, runs))
    tokens = np.array([run[:depth] for run in runs], np.int32)
    return chain_trees([s.root for s in sequences], tokens)


def with_forced_tokens(sequences: Sequence[SequenceState], trees: DraftTrees) -> DraftTrees:
    """The chains with what is forced in the place of other tokens."""
    if not trees.contiguous or all(sequence.guide is None for sequence in sequences):
        return trees
    tokens = trees.tokens.copy()
    for b, sequence in enumerate(sequences):
        if sequence.guide is not None and not sequence.guide.is_remote:
            _insert_forced(sequence.guide, sequence.output, tokens[b, 1 : trees.count[b]])
    return replace(trees, tokens=tokens)


def _insert_forced(guide: GuideState, output: np.ndarray, drafts: np.ndarray) -> None:
    """Changes the drafts behind ``output`` in place, up to the first that is refused."""
    position = 0
    while position < len(drafts):
        tokens = np.concatenate([output, drafts[:position]])
        forced = guide.forced(tokens)[: len(drafts) - position]
        if forced:
            drafts[position : position + len(forced)] = forced
            position += len(forced)
            continue
        if not guide.allows(tokens, int(drafts[position])):
            return
        position += 1
