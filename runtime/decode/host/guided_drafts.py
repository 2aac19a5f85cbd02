"""Drafts that follow guides: forced tokens are drafted without a draft model.

If a guide allows a single next token, that token is always accepted as a draft. After a draft token
that the guide refuses, nothing can be accepted. So forced tokens replace other tokens in the chains
of a step. If all chains consist of forced tokens, the draft model does not run. Trees with branches
are left unchanged.
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
    """Return chains of forced tokens, as long as the shortest run and ``max_tokens`` allow.

    Return None if a sequence has no guide, or if a run is shorter than ``min_tokens`` and does not
    end the output.
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
    """Return the chains with their tokens replaced by forced ones."""
    if not trees.contiguous or all(sequence.guide is None for sequence in sequences):
        return trees
    tokens = trees.tokens.copy()
    for b, sequence in enumerate(sequences):
        if sequence.guide is not None and not sequence.guide.is_remote:
            _insert_forced(sequence.guide, sequence.output, tokens[b, 1 : trees.count[b]])
    return replace(trees, tokens=tokens)


def _insert_forced(guide: GuideState, output: np.ndarray, drafts: np.ndarray) -> None:
    """Insert forced tokens into ``drafts`` in place, up to the first refused draft."""
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
