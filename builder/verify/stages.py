"""Runs the engine and the reference on the same tokens: prefill, then a tree.

Tree nodes are compared with a replay of each node's path from the start, which shares no masks,
slots or positions with the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specbuild.builder.families.parts.path_draft import (
    BlockDraft,
    CacheDraft,
    DraftStates,
    PathDraft,
    ReferenceDraft,
)
from specbuild.builder.verify.block_check import compare_block
from specbuild.builder.verify.cache_check import compare_levels
from specbuild.builder.verify.comparison import Comparison
from specbuild.builder.verify.engine_probe import (
    DRAFT_STAGES,
    EngineProbe,
    ProbedSequence,
    target_stages,
)
from specbuild.builder.verify.reference_target import ReferenceTarget, TargetStates

# Parents of the verified tree: siblings, cousins, and a node three levels down.
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3)
# Draft levels: tokens per level, and the parent (in the previous level) of each.
DRAFT_LEVEL_PARENTS = ((0, 0), (0, 1), (1, 0))
# Levels of a chain that a draft over the target's caches drafts.
CACHE_LEVELS = 3
# Rows of a draft that drafts several positions in one pass.
MASK_ROWS = 3


@dataclass(frozen=True)
class Sample:
    """``ids`` [L] and the tokens of a tree below them: ``tree[0]`` is the root, token L."""

    ids: np.ndarray
    tree: np.ndarray

    def path(self, node: int) -> list[int]:
        """Return the tree nodes from the root to ``node``."""
        path = []
        while node >= 0:
            path.append(node)
            node = TREE_PARENTS[node]
        return path[::-1]

    def path_ids(self, node: int) -> np.ndarray:
        """Return the tokens up to and including ``node``."""
        return np.concatenate([self.ids, self.tree[self.path(node)]])


@dataclass(frozen=True)
class SampleReference:
    """The reference's states of a sample: the committed rows, and each node's last row."""

    prefill: TargetStates
    nodes: tuple[TargetStates, ...]

    @property
    def routing_margin(self) -> float:
        """The minimum of all its runs."""
        return min(states.routing_margin for states in (self.prefill, *self.nodes))


def run_reference(reference: ReferenceTarget, sample: Sample) -> SampleReference:
    """Replay the sample: its committed tokens, and every path of its tree."""
    nodes = tuple(reference.run(sample.path_ids(node)) for node in range(len(sample.tree)))
    return SampleReference(reference.run(sample.ids), nodes)


class StageCheck:
    """Compares an engine's stages on samples."""

    def __init__(self, probe: EngineProbe, draft: ReferenceDraft | None) -> None:
        self.probe = probe
        self.draft = draft
        self.comparison = Comparison()
        self._stages = target_stages(probe.manifest.target.layers)

    def check(self, sample: Sample, reference: SampleReference) -> None:
        """Run one prefill in two chunks, one tree, and the draft on the same tokens."""
        with self.probe.sequence(len(sample.ids) + 1) as sequence:
            aux_hidden = [
                self._prefill(sequence, sample, reference, rows)
                for rows in _two_chunks(len(sample.ids))
            ]
            self._tree(sequence, sample, reference)
            given = np.concatenate(aux_hidden)
            if isinstance(self.draft, BlockDraft):
                assert self.probe.model is not None
                expected_rows = reference.prefill.aux_hidden(self.probe.model.geometry.aux_layers)
                root = int(sample.tree[0])
                compare_block(
                    sequence,
                    self.draft,
                    self.comparison,
                    aux_hidden=(given, expected_rows),
                    root=root,
                )
            elif isinstance(self.draft, CacheDraft):
                compare_levels(
                    sequence,
                    self.draft,
                    self.comparison,
                    aux_hidden=given[-1:],
                    ids=sample.ids,
                    path=sample.tree[:CACHE_LEVELS],
                )
            elif self.draft is not None:
                self._draft(sequence, sample, given, reference, self.draft)

    def _prefill(
        self, sequence: ProbedSequence, sample: Sample, reference: SampleReference, rows: slice
    ) -> np.ndarray:
        feeds = {"token_ids": sample.ids[rows].astype(np.int32)}
        outputs = sequence.extend("target", feeds)
        self._compare_target(outputs, reference.prefill, slice(None), rows)
        aux_hidden = self.probe.aux_hidden(outputs)
        empty = np.empty((len(feeds["token_ids"]), 0), np.float32)
        return empty if aux_hidden is None else aux_hidden

    def _tree(self, sequence: ProbedSequence, sample: Sample, reference: SampleReference) -> None:
        count, length = len(sample.tree), len(sample.ids)
        paths = [sample.path(node) for node in range(count)]
        ancestors = np.zeros((count, count), bool)
        for node, path in enumerate(paths):
            ancestors[node, path] = True
        outputs = sequence.branch(
            "target",
            {"token_ids": sample.tree.astype(np.int32)},
            slots=range(count),
            positions=[length + len(path) - 1 for path in paths],
            ancestors=ancestors,
        )
        sequence.forget_tree("target")
        for node, states in enumerate(reference.nodes):
            self._compare_target(outputs, states, slice(node, node + 1), slice(-1, None))

    def _compare_target(
        self,
        outputs: dict[str, np.ndarray],
        states: TargetStates,
        got: slice,
        expected: slice,
    ) -> None:
        named = dict(zip(self._stages, (*states.layers, states.pre_head), strict=True))
        renamed = {name: f"target {name.removeprefix('stage.')}" for name in named}
        self.comparison.states(
            {renamed[name]: outputs[name][got] for name in named},
            {renamed[name]: rows[expected] for name, rows in named.items()},
        )
        if self.draft is not None:
            given = self.probe.aux_hidden(outputs)
            assert self.probe.model is not None and given is not None
            expected_rows = states.aux_hidden(self.probe.model.geometry.aux_layers)
            self.comparison.states(
                {"aux hidden states": given[got]},
                {"aux hidden states": expected_rows[expected]},
            )
        self.comparison.logits("target logits", outputs["logits"][got], states.logits[expected])

    def _draft(
        self,
        sequence: ProbedSequence,
        sample: Sample,
        aux_hidden: np.ndarray,
        reference: SampleReference,
        draft: PathDraft,
    ) -> None:
        """Row t pairs h_t with x_{t+1}; the last pairs with the root of the tree."""
        assert self.probe.model is not None
        next_ids = np.append(sample.ids[1:], sample.tree[0])
        expected_aux_hidden = torch.from_numpy(
            reference.prefill.aux_hidden(self.probe.model.geometry.aux_layers)
        )
        fused = self.probe.run("draft_fuse", {"captured": aux_hidden})["hidden"]
        expected_fused = draft.fuse(expected_aux_hidden)
        self.comparison.states({"fuse": fused}, {"fuse": expected_fused.numpy()})
        ids = torch.from_numpy(next_ids.astype(np.int64))
        committed = draft.run(ids, expected_fused, torch.arange(len(ids)))
        hidden = np.empty((0, 0), np.float32)
        for rows in _two_chunks(len(next_ids)):
            feeds = {"token_ids": next_ids[rows].astype(np.int32), "hidden": fused[rows]}
            outputs = sequence.extend("draft", feeds)
            self._compare_draft(outputs, committed, slice(None), rows)
            hidden = outputs["hidden_out"][-1:]
        for launch in _draft_levels(sample):
            feeds = {
                "token_ids": launch.tokens.astype(np.int32),
                "hidden": hidden[list(launch.parents)],
            }
            outputs = sequence.branch(
                "draft",
                feeds,
                slots=launch.slots,
                positions=[len(next_ids) - 1 + launch.level] * len(launch.tokens),
                ancestors=launch.ancestors,
            )
            hidden = outputs["hidden_out"]
            for row, path in enumerate(launch.paths):
                states = draft.follow(expected_aux_hidden, ids, torch.from_numpy(path))
                self._compare_draft(outputs, states, slice(row, row + 1), slice(-1, None))
        sequence.forget_tree("draft")
        if draft.mask is not None:
            self._mask_rows(sequence, ids, expected_fused, draft)

    def _mask_rows(
        self,
        sequence: ProbedSequence,
        ids: torch.Tensor,
        fused: torch.Tensor,
        draft: PathDraft,
    ) -> None:
        """Return the rows after the committed ones, without a token or a state, of one pass."""
        assert draft.mask is not None
        token, states = draft.mask
        stored = self.probe.run("draft_fuse", {"captured": states.numpy()})["mask_hidden"]
        expected = draft.fuse(states)
        self.comparison.states({"mask state": stored}, {"mask state": expected.numpy()})
        outputs = sequence.branch(
            "draft",
            {
                "token_ids": np.full(MASK_ROWS, token, np.int32),
                "hidden": np.repeat(stored, MASK_ROWS, axis=0),
            },
            slots=range(MASK_ROWS),
            positions=range(len(ids), len(ids) + MASK_ROWS),
            ancestors=np.tri(MASK_ROWS, dtype=bool),
        )
        sequence.forget_tree("draft")
        rows = draft.run(
            torch.cat([ids, torch.full((MASK_ROWS,), token)]),
            torch.cat([fused, expected.expand(MASK_ROWS, -1)]),
            torch.arange(len(ids) + MASK_ROWS),
        )
        self.comparison.logits(
            "draft mask rows", outputs["draft_logits"], rows.logits[-MASK_ROWS:].numpy()
        )

    def _compare_draft(
        self, outputs: dict[str, np.ndarray], states: DraftStates, got: slice, expected: slice
    ) -> None:
        named = dict(
            zip(DRAFT_STAGES, (states.attention, states.ffn, states.pre_head), strict=True)
        )
        renamed = {name: f"draft {name.removeprefix('stage.')}" for name in named}
        self.comparison.states(
            {renamed[name]: outputs[name][got] for name in named}
            | {"draft recurrence": outputs["hidden_out"][got]},
            {renamed[name]: rows[expected].numpy() for name, rows in named.items()}
            | {"draft recurrence": states.recurrence[expected].numpy()},
        )
        self.comparison.logits(
            "draft logits", outputs["draft_logits"][got], states.logits[expected].numpy()
        )


@dataclass(frozen=True)
class _DraftLevel:
    """Run one launch of a draft level: K rows, each with its path of tokens below the root."""

    level: int
    tokens: np.ndarray
    parents: tuple[int, ...]
    slots: range
    ancestors: np.ndarray
    paths: tuple[np.ndarray, ...]


def _draft_levels(sample: Sample) -> Iterator[_DraftLevel]:
    """Return levels of two nodes each, with tokens from the sample."""
    pool = np.concatenate([sample.tree, sample.ids]).astype(np.int64)
    width, total = 2, 2 * len(DRAFT_LEVEL_PARENTS)
    ancestors, paths = np.zeros((1, total), bool), [np.empty(0, np.int64)]
    for level, parents in enumerate(DRAFT_LEVEL_PARENTS, start=1):
        slots = range((level - 1) * width, level * width)
        tokens = pool[1 + slots.start : 1 + slots.stop]
        ancestors = ancestors[list(parents)].copy()
        ancestors[np.arange(width), list(slots)] = True
        paths = [np.append(paths[p], t) for p, t in zip(parents, tokens, strict=True)]
        yield _DraftLevel(level, tokens, parents, slots, ancestors, tuple(paths))


def _two_chunks(count: int) -> tuple[slice, slice]:
    """Return uneven chunks, so that the second begins inside a page."""
    cut = max(1, count * 2 // 3 - 1)
    return slice(0, cut), slice(cut, count)
