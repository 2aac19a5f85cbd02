"""Rounds of drafting without a target: sequences grow by random tokens and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.draft.drafter import CachingDrafter, DrafterParts
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.request import GenerateParams, Request, SequenceState
from specbuild.runtime.statistics import RunCounters

LENGTHS = (9, 1, 30)
MOST = 128


def best_paths(
    logits_of: Callable[[tuple[int, ...]], torch.Tensor],
    target_ids: torch.Tensor,
    shape: DraftShape,
) -> set[tuple[int, ...]]:
    """Return the paths of the best nodes. The best K nodes of a level have K children each.

    ``logits_of(path)`` [Vd] are the draft's logits after a path. ``target_ids`` [Vd] are the target
    ids of its tokens.
    """
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(shape.draft_depth):
        level = []
        for score, path in frontier:
            chances = logits_of(path).double().log_softmax(dim=0)
            for i in chances.argsort(descending=True)[: shape.draft_top_k]:
                level.append((score + float(chances[i]), (*path, int(target_ids[i]))))
        frontier = sorted(level, reverse=True)[: shape.draft_top_k]
        pool += level
    return {path for _, path in sorted(pool, reverse=True)[: shape.draft_tokens]}


def likeliest(
    logits: torch.Tensor, target_ids: torch.Tensor, shape: DraftShape
) -> set[tuple[int, ...]]:
    """Apply :func:`best_paths` to a one-pass draft with the logits [D, Vd] of its levels."""
    return best_paths(lambda path: logits[len(path)], target_ids, shape)


def parts_of(probe: EngineProbe, place: int = 0) -> DrafterParts:
    """Return the constructor arguments of the drafter at this index of a probe's engine."""
    record = probe.manifest.drafters[place]
    return DrafterParts(probe.executor, probe.manifest, probe.counter, record)


def paths_of(trees: DraftTrees, b: int) -> set[tuple[int, ...]]:
    """Return the paths of a tree's nodes."""
    return {tuple(trees.path(b, node)) for node in range(1, int(trees.count[b]))}


def check_rounds(
    drafter: CachingDrafter,
    manifest: Manifest,
    rounds: Sequence[tuple[int, DraftShape]],
    expected: Callable[[torch.Tensor, torch.Tensor, DraftShape], set[tuple[int, ...]]],
) -> None:
    """Let three sequences propose and then commit tokens, in several rounds.

    ``expected`` returns the paths of a sequence's tree from its captured states [L, n·H], its
    tokens [L + 1] and the shape. After each round the draft's cache has L tokens.
    """
    random = torch.Generator().manual_seed(3)
    vocab = manifest.target.vocab
    width = len(manifest.aux_layers) * manifest.target.hidden
    ids = torch.randint(0, vocab, (len(LENGTHS), MOST), generator=random)
    states = torch.randn(len(LENGTHS), MOST, width, generator=random)
    kv = KvPools(manifest.cache_groups, manifest.limits)
    sequences = [_sequence(kv, ids[i].numpy(), i, length) for i, length in enumerate(LENGTHS)]
    for sequence in sequences:
        drafter.observe(sequence, states[sequence.index, : sequence.length].numpy())
    for grown, shape in rounds:
        trees = drafter.propose(sequences, shape)
        for b, sequence in enumerate(sequences):
            length = sequence.length
            assert paths_of(trees, b) == expected(states[b, :length], ids[b, : length + 1], shape)
            assert sequence.pages[drafter.cache_groups[0]].length == length
            sequence.length, sequence.num_tokens = length + grown, length + grown + 1
            if grown:
                drafter.observe(sequence, states[b, length : length + grown].numpy())


def _sequence(kv: KvPools, ids: np.ndarray, index: int, length: int) -> SequenceState:
    return SequenceState(
        request=Request("r", (0,), GenerateParams(), 4),
        index=index,
        ids=ids.astype(np.int32),
        pages=kv.admit(kv.pages_needed(64)),
        counters=RunCounters(0),
        text=None,
        num_tokens=length + 1,
        length=length,
    )
