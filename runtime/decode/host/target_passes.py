"""Runs the target on the host: lays out the rows of a launch and places them in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter, cache_feeds, groups_of
from specbuild.runtime.cache.state_paths import path_feeds, replayed_inputs
from specbuild.runtime.cache.state_snapshots import StateSnapshots
from specbuild.runtime.decode.host.row_samples import RowSampler, SampledRows
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.lossy.dsa.host import HostSelections
from specbuild.runtime.lossy.mode import HostMode, HostModeRequest, Verified
from specbuild.runtime.lossy.specpv.host_tables import HostViews
from specbuild.runtime.request import SequenceState


class TargetPasses:
    """Runs the roles ``target`` and ``accept``. Lossy modes change their inputs."""

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        counter: SlotCounter,
        *,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._executor = executor
        self._counter = counter
        self.sampler = RowSampler(executor, manifest.target.eos_token_ids)
        self._modes: list[HostMode] = []
        if manifest.specpv is not None:
            self._modes.append(HostViews(manifest, counter))
        if manifest.dsa is not None:
            self._modes.append(HostSelections(manifest))
        self.groups = groups_of(manifest.roles["target"])
        self._states = manifest.state_groups
        self._snapshots = snapshots
        mode_groups = {group for mode in self._modes for group in mode.groups}
        self._plain_groups = tuple(g for g in self.groups if g not in mode_groups)

    def admit(self, sequence: SequenceState) -> None:
        """Add a sequence that will be prefilled, from its snapshot if it has one."""
        if self._snapshots is not None:
            self._snapshots.restore(sequence.pages)
        for mode in self._modes:
            mode.begin(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Remove a sequence."""
        for mode in self._modes:
            mode.release(sequence)

    def advance(self, sequence: SequenceState, count: int) -> None:
        """Commit ``count`` more tokens, which are in the cache."""
        sequence.length += count
        if self._snapshots is not None and sequence.prefix is not None:
            self._snapshots.capture(
                sequence.pages, sequence.length, len(sequence.request.prompt_ids)
            )
        sequence.publish(sequence.length)
        reverified = min((m.reverifies_from(sequence) for m in self._modes), default=None)
        for group in self.groups:
            sequence.pages[group].commit(sequence.length, reverified=reverified)

    def prompts(
        self, sequences: Sequence[SequenceState], rows: RowLayout, logit_rows: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Run one pass over prompt rows; return the logits of ``logit_rows`` and other outputs."""
        spans = zip(sequences, rows.first, rows.count, strict=True)
        feeds = {
            "token_ids": np.concatenate([s.ids[f : f + n] for s, f, n in spans]),
            "positions": self._counter.ranges(rows.first, rows.count),
            "ancestor_bits": np.zeros((rows.rows, 1), np.int32),
            "logit_rows": np.array(logit_rows, np.int32),
        }
        feeds |= self._place_rows(sequences, rows)
        if self._states:
            starts = rows.row_start().tolist()
            paths: list[tuple[int, Sequence[int]]] = [
                (b, range(*starts[b : b + 2])) for b in range(len(sequences))
            ]
            feeds |= self._state_feeds(sequences, paths, stores=True)
        for mode in self._modes:
            feeds |= mode.feeds(sequences, rows, None, trial=False)
        return self._executor.run("target", feeds)

    def verify(self, sequences: Sequence[SequenceState], trees: DraftTrees) -> Verified:
        """Verify every tree; return accepted paths. A mode that checks itself verifies twice."""
        nodes = (trees.count - 1).tolist()
        mode_requests = [mode.request_step(sequences, nodes) for mode in self._modes]
        if any(mode_request.checks for mode_request in mode_requests):
            self._verify(sequences, trees, mode_requests, trial=True)
        return self._verify(sequences, trees, mode_requests, trial=False)

    def _verify(
        self,
        sequences: Sequence[SequenceState],
        trees: DraftTrees,
        mode_requests: Sequence[HostModeRequest],
        *,
        trial: bool,
    ) -> Verified:
        chain_starts = next(
            (p.chain_start for p in mode_requests if p.chain_start is not None), None
        )
        rows = _tree_rows(sequences, trees, chain_starts, self._counter)
        feeds = rows.feeds | self._place_rows(sequences, rows.layout)
        if self._states:
            # A root alone is accepted for certain, so its launch may store the state.
            paths = [
                (b, [int(rows.root_row[b]) + slot for slot in path])
                for b in range(len(sequences))
                for path in trees.leaf_paths(b)
            ]
            feeds |= self._state_feeds(sequences, paths, stores=trees.nodes == 0)
        for mode, mode_request in zip(self._modes, mode_requests, strict=True):
            feeds |= mode.feeds(sequences, rows.layout, mode_request, trial=trial)
        outputs = self._executor.run("target", feeds)
        sampled_rows = SampledRows(
            sequences, rows.layout.count, feeds["positions"], outputs["logits"], trees
        )
        row_sampled, row_logprob = self.sampler.sample(sampled_rows, counts=not trial)
        sampled = rows.by_slot(row_sampled, unused=-1)
        path, accepted = self._accept(trees, sampled)
        verified = Verified(
            sampled=sampled,
            logprob=rows.by_slot(row_logprob, unused=0),
            path=path,
            accepted=accepted,
            root_row=rows.root_row,
            row_sampled=row_sampled,
            outputs=outputs,
            checked=any(mode_request.checks for mode_request in mode_requests),
            trial=trial,
        )
        for mode, mode_request in zip(self._modes, mode_requests, strict=True):
            mode.received(sequences, mode_request, verified)
        return verified

    def commit(
        self, sequences: Sequence[SequenceState], trees: DraftTrees, verified: Verified
    ) -> None:
        """Bring the caches to the state after the accepted paths.

        Entries of accepted nodes move to the committed slots; recurrent states are computed again
        over the accepted rows.
        """
        path = verified.path
        nodes = np.arange(path.shape[1])
        is_moved = (path >= 0) & (path != nodes)
        replays = bool(self._states) and trees.nodes > 0
        if not (replays or is_moved.any()):
            return
        feeds = {}
        for group in self.groups:
            source = np.full(path.shape, -1, np.int32)
            target = np.full(path.shape, -1, np.int32)
            for b, sequence in enumerate(sequences):
                slots = sequence.pages[group].slots
                source[b, is_moved[b]] = slots[sequence.length + path[b, is_moved[b]]]
                target[b, is_moved[b]] = slots[sequence.length + nodes[is_moved[b]]]
            feeds[f"{group}.from_slot"], feeds[f"{group}.to_slot"] = source, target
        if replays:
            accepted = [
                (b, (verified.root_row[b] + path[b, : count + 1]).tolist())
                for b, count in enumerate(verified.accepted)
            ]
            feeds |= self._state_feeds(sequences, accepted, stores=True)
            for states in self._states:
                feeds |= replayed_inputs(states, verified.outputs)
        self._executor.run("commit", feeds)

    def _state_feeds(
        self,
        sequences: Sequence[SequenceState],
        paths: Sequence[tuple[int, Sequence[int]]],
        *,
        stores: bool,
    ) -> dict[str, np.ndarray]:
        feeds: dict[str, np.ndarray] = {}
        for group in self._states:
            holders = [sequence.pages[group.name] for sequence in sequences]
            feeds |= path_feeds(group, holders, paths, stores=stores)
        return feeds

    def _accept(self, trees: DraftTrees, sampled: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return each tree's longest path that agrees with the target's samples, and its length."""
        if trees.nodes == 0:
            return np.zeros((len(trees.count), 1), np.int32), [0] * len(trees.count)
        outputs = self._executor.run("accept", trees.accept_feeds(sampled))
        return outputs["path"], outputs["accepted"].tolist()

    def _place_rows(
        self, sequences: Sequence[SequenceState], rows: RowLayout
    ) -> dict[str, np.ndarray]:
        """Allocate pages for the rows; return their places in the caches as graph inputs."""
        feeds = {"row_start": rows.row_start()}
        for group in self.groups:
            holders = [s.pages[group] for s in sequences]
            for holder, first, count in zip(holders, rows.first, rows.count, strict=True):
                holder.append(first + count - holder.length)
            if group in self._plain_groups:
                feeds |= cache_feeds(group, holders, rows, self._counter)
        return feeds


class _TreeRows(NamedTuple):
    """The rows of a pass over trees. Each tree follows the re-verified tokens of its sequence.

    ``feeds`` are the graph inputs [T, ...] that do not depend on caches. ``root_row`` [B] is the
    row of each root. ``used`` [B, N+1] marks the slots that have a row, ``in_tree`` [T] the rows
    that have a slot; None: all have one.
    """

    layout: RowLayout
    feeds: dict[str, np.ndarray]
    root_row: np.ndarray
    used: np.ndarray | None
    in_tree: np.ndarray | None
    shape: tuple[int, ...]

    def by_slot(self, values: np.ndarray, *, unused: int) -> np.ndarray:
        """Return the values of rows [T], arranged by slot [B, N+1]."""
        if self.in_tree is not None:
            values = values[self.in_tree]
        if self.used is None:
            return values.reshape(self.shape)
        slots = np.full(self.shape, unused, values.dtype)
        slots[self.used] = values
        return slots


def _tree_rows(
    sequences: Sequence[SequenceState],
    trees: DraftTrees,
    chain_starts: Sequence[int] | None,
    counter: SlotCounter,
) -> _TreeRows:
    """Lay out the rows of each tree after a chain of re-verified tokens.

    The chain has the tokens from ``chain_starts[b]`` on; None is no chain. Slot i of sequence b is
    cache slot L + i.
    """
    count: list[int] = trees.count.tolist()
    length = [s.length for s in sequences]
    first = length if chain_starts is None else chain_starts
    chain_lengths = [n - f for n, f in zip(length, first, strict=True)]
    layout = RowLayout(first, [c + n for c, n in zip(chain_lengths, count, strict=True)], length)
    # If every slot has a row, reshaping needs no copy.
    used = None if trees.full else np.arange(trees.tokens.shape[1]) < trees.count[:, None]

    def rows_of(slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1, *slots.shape[2:]) if used is None else slots[used]

    token_ids, bits = rows_of(trees.tokens), rows_of(trees.ancestor_bits)
    positions = rows_of(trees.depths + np.array(length, np.int32)[:, None])
    root_row, in_tree = layout.row_start(), None
    if any(chain_lengths):
        reverified = [s.ids[f:n] for s, f, n in zip(sequences, first, length, strict=True)]
        before = np.repeat(np.cumsum([0, *count[:-1]]), chain_lengths)
        in_tree = np.insert(np.ones(len(token_ids), bool), before, False)
        token_ids = np.insert(token_ids, before, np.concatenate(reverified))
        positions = np.insert(positions, before, counter.ranges(first, chain_lengths))
        bits = np.insert(bits, before, 0, axis=0)
        root_row = root_row[:-1] + np.array(chain_lengths, np.int32)
    feeds = {
        "token_ids": token_ids,
        "positions": positions,
        "ancestor_bits": bits,
        "logit_rows": counter.range(0, layout.rows),
    }
    return _TreeRows(
        layout=layout,
        feeds=feeds,
        root_row=root_row,
        used=used,
        in_tree=in_tree,
        shape=trees.tokens.shape,
    )
