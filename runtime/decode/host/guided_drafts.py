"""Drafts that follow guides: forced tokens are drafted without a draft model.

If a guide allows a single next token, that token is always accepted as a draft. After a draft token
that the guide refuses, nothing can be accepted. So forced tokens replace other tokens in the chains
of a step. If all chains consist of forced tokens, the draft model does not run. A step without a
draft verifies the forced tokens of each sequence. Trees with branches are left unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.draft.host_proposal import HostProposal
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.guides.grammar import GuideState
from specbuild.runtime.request import SequenceState


def forced_chains(
    sequences: Sequence[SequenceState], *, min_tokens: int, max_tokens: Sequence[int]
) -> DraftTrees | None:
    """Return the chain of forced tokens of each sequence, of up to ``max_tokens[b]`` tokens.

    Return None if there are no such tokens, or if a run is shorter than ``min_tokens`` and does not
    end the output.
    """
    chains = []
    for sequence, longest in zip(sequences, max_tokens, strict=True):
        guide, output = sequence.guide, sequence.output
        run = [] if guide is None or longest < 1 else guide.forced(output)
        if len(run) < min_tokens and not (
            guide is not None and run and guide.complete(np.concatenate([output, run]))
        ):
            return None
        chains.append(run[:longest])
    depths = [len(chain) for chain in chains]
    proposal = HostProposal(chains, tuple((1.0,) * depth for depth in depths))
    return proposal.trees([s.root for s in sequences], depths) if any(depths) else None


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
