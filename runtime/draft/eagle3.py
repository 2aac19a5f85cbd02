"""EAGLE3: a draft model that grows a tree level by level, with one run per level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, cache_feeds, groups_of
from specbuild.runtime.draft.drafter import DrafterCapabilities, DrafterKind, DrafterParts
from specbuild.runtime.draft.shared_noise import CANDIDATES, SharedNoise
from specbuild.runtime.draft.static_levels import grow
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.draft.tree import (
    DraftTrees,
    chain_bits,
    chain_trees,
    read_only,
    slot_bits,
)
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import ModelRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.request import SequenceState

# Bytes reserved for the pending aux hidden states of a sequence. The system allocates a page of
# this buffer only when it is first written.
PENDING_BYTES = 32 << 20

_CAPABILITIES = DrafterCapabilities(
    name="eagle3",
    reads_aux_hidden=True,
    needs_weights=True,
    passes="levels",
    branches=True,
    needs_host=False,
)


class _Pending:
    """Rows of aux hidden states that the draft's cache does not hold yet."""

    def __init__(self, capacity: int, width: int) -> None:
        self._rows = np.empty((capacity, width), np.float32)
        self.count = 0

    def free_rows(self) -> int:
        return len(self._rows) - self.count

    def add(self, rows: np.ndarray) -> None:
        self._rows[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def first(self, count: int) -> np.ndarray:
        return self._rows[:count]

    def drop(self, count: int) -> None:
        left = self.count - count
        if left:
            self._rows[:left] = self._rows[count : self.count].copy()
        self.count = left


class Eagle3Drafter:
    """Runs the draft graphs (docs/developers/contracts.md#drafting-a-tree).

    Committed rows stay pending until the next draft, or until ``PENDING_BYTES`` are full. So a step
    without a draft does not run the draft model. Prompt rows that the prefix cache is to store are
    ingested at once.
    """

    def __init__(
        self,
        parts: DrafterParts,
        capabilities: DrafterCapabilities = _CAPABILITIES,
    ) -> None:
        record = parts.record
        assert isinstance(record, ModelRecord)
        self.capabilities = capabilities
        self.cache_groups = (record.cache_group,)
        self._executor = parts.executor
        self._role = {name: record.role(name) for name in record.ROLES}
        self._groups = groups_of(parts.manifest.roles[self._role["draft"]])
        self._counter = parts.counter
        self._max_rows = parts.manifest.limits.max_rows
        # Other backends expand no more children than a tree can have.
        self._can_share_noise = facts_of(parts.manifest.backend).has_graphs
        self._vocab = record.geometry.vocab
        self._columns = columns_of(parts.manifest, record.geometry.aux_layers)
        self._pending: dict[int, _Pending] = {}

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Store the new rows as pending; first ingest the stored rows if the buffer lacks space."""
        assert aux_hidden is not None
        aux_hidden = aux_hidden[:, self._columns]
        pending = self._pending.get(sequence.index)
        if pending is None:
            width = aux_hidden.shape[1]
            pending = _Pending(max(self._max_rows, PENDING_BYTES // (4 * width)), width)
            self._pending[sequence.index] = pending
        if len(aux_hidden) > pending.free_rows():
            self._ingest(sequence, pending.count)
        pending.add(aux_hidden)
        if (prefix := sequence.prefix) is not None:
            required = prefix.cache.num_draft_tokens(prefix, sequence.length + 1)
            self._ingest(sequence, required - self._draft_length(sequence))

    def release(self, sequence: SequenceState) -> None:
        """Discard the sequence's pending rows."""
        self._pending.pop(sequence.index, None)

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return a chain if ``draft_top_k`` is 1, else the best nodes of a dynamic tree."""
        logits, hidden = self._first_level(sequences)
        if isinstance(shape, StaticTree):
            trees = grow(self, sequences, shape, logits, hidden)
            self._discard_tree(sequences)
            return trees
        if shape.draft_top_k == 1:
            depth = min(shape.draft_depth, shape.draft_tokens)
            return self._chain(sequences, logits, hidden, depth)
        return self._tree(sequences, logits, hidden, shape)

    def tree_starts(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Return the length of each sequence's draft cache, where its tree starts."""
        return [self._draft_length(s) for s in sequences]

    def run_rows(
        self,
        sequences: Sequence[SequenceState],
        layout: RowLayout,
        tree_rows: int,
        feeds: Mapping[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the draft over the newest rows of trees, and return their logits and features.

        ``tree_rows`` is the number of rows of each tree, including these.
        """
        for sequence in sequences:
            self._append(sequence, tree_rows)
        rows = self._counter.range(0, layout.rows)
        return self._draft(sequences, layout, **feeds, logit_rows=rows)

    def best_tokens(
        self, sequences: Sequence[SequenceState], logits: np.ndarray, level: int, top_k: int
    ) -> np.ndarray:
        """Return the best target tokens of each row of logits, which draft ``level``: [rows, K]."""
        rows = len(logits) // len(sequences)
        noise = self._noise(sequences, [level] * rows)
        return self._expand(logits, _root_scores(len(logits)), top_k, noise)["tokens"]

    def _first_level(self, sequences: Sequence[SequenceState]) -> tuple[np.ndarray, np.ndarray]:
        """Ingest all pending rows; return logits [B, Vd] of level 1 and their features [B, H]."""
        counts = [self._pending[s.index].count for s in sequences]
        if sum(counts) > self._max_rows:
            for sequence, count in zip(sequences, counts, strict=True):
                self._ingest(sequence, count - 1)
            counts = [1] * len(sequences)
        return self._extend(sequences, counts)

    def _ingest(self, sequence: SequenceState, count: int) -> None:
        """Ingest ``count`` pending rows, in launches of at most ``max_rows`` rows."""
        while count > 0:
            rows = min(count, self._max_rows)
            self._ingest_rows([sequence], [rows])
            count -= rows

    def _ingest_rows(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Write pending rows to the draft's cache in one launch."""
        self._extend(sequences, counts)

    def _extend(
        self, sequences: Sequence[SequenceState], counts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write pending rows to the draft's cache.

        The input of row t is the target's state h_t and the token x_{t+1}. Return logits [B, Vd]
        and output features [B, H] of each sequence's last row.
        """
        pending = [self._pending[s.index] for s in sequences]
        aux_hidden = [p.first(n) for p, n in zip(pending, counts, strict=True)]
        fused = self._executor.run(self._role["draft_fuse"], {"captured": _joined(aux_hidden)})
        first = [self._draft_length(s) for s in sequences]
        spans = list(zip(sequences, first, counts, strict=True))
        layout = RowLayout(first, counts, [f + n for f, n in zip(first, counts, strict=True)])
        for sequence, _, count in spans:
            self._append(sequence, count)
        last_rows = layout.row_start()[1:] - 1
        logits, out = self._draft(
            sequences,
            layout,
            token_ids=_joined([s.ids[f + 1 : f + n + 1] for s, f, n in spans]),
            hidden=fused["hidden"],
            positions=self._counter.ranges(first, counts),
            ancestor_bits=_no_bits(layout.rows),
            logit_rows=last_rows,
        )
        self._committed(sequences, first, counts)
        return logits, out[last_rows]

    def _committed(
        self, sequences: Sequence[SequenceState], first: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Commit ``counts`` pending rows of each sequence; ``first`` are their first positions."""
        for sequence, start, count in zip(sequences, first, counts, strict=True):
            for group in self._groups:
                sequence.publish(start + count, draft=group)
                sequence.pages[group].commit(start + count)
            self._pending[sequence.index].drop(count)

    def _chain(
        self,
        sequences: Sequence[SequenceState],
        logits: np.ndarray,
        hidden: np.ndarray,
        depth: int,
    ) -> DraftTrees:
        """Return the chain of the best token of each level."""
        batch = len(sequences)
        score = _root_scores(batch)
        start = [self._draft_length(s) for s in sequences]
        rows = self._counter.range(0, batch)
        levels: list[np.ndarray] = []
        for level in range(1, depth + 1):
            if level > 1:
                first = [s + level - 2 for s in start]
                for sequence in sequences:
                    self._append(sequence, level - 1)
                logits, hidden = self._draft(
                    sequences,
                    RowLayout(first, [1] * batch, start),
                    token_ids=levels[-1],
                    hidden=hidden,
                    positions=self._counter.ranges(first, [1] * batch),
                    ancestor_bits=chain_bits(level - 1, depth, batch),
                    logit_rows=rows,
                )
            best = self._expand(logits, score, 1, self._noise(sequences, [level]))
            # The next level's run overwrites the returned buffer.
            levels.append(best["tokens"].reshape(-1).copy())
        self._discard_tree(sequences)
        return chain_trees([s.root for s in sequences], np.stack(levels, axis=1))

    def _tree(
        self,
        sequences: Sequence[SequenceState],
        logits: np.ndarray,
        hidden: np.ndarray,
        shape: DraftShape,
    ) -> DraftTrees:
        """Grow a tree with the expand and draft graphs, and select its best nodes."""
        batch, k = len(sequences), shape.draft_top_k
        start = [self._draft_length(s) for s in sequences]
        bits_of_slots = slot_bits(k, shape.draft_depth)
        bits = np.zeros((batch, 1, bits_of_slots.shape[2]), np.uint32)
        hidden = hidden.reshape(batch, 1, -1)
        children = self._expand(logits, _root_scores(batch), k, self._noise(sequences, [1]))
        tokens, scores = [children["tokens"].copy()], [children["scores"].copy()]
        parents = [np.full((batch, k), -1, np.int32)]
        offset = 0
        for level in range(1, shape.draft_depth):
            frontier = children["frontier"]
            parent_row = (frontier // k)[..., None]
            hidden = np.take_along_axis(hidden, parent_row, axis=1)
            bits = np.take_along_axis(bits, parent_row, axis=1) | bits_of_slots[level - 1]
            first = [s + (level - 1) * k for s in start]
            for sequence in sequences:
                self._append(sequence, level * k)
            logits, out = self._draft(
                sequences,
                RowLayout(first, [k] * batch, start),
                token_ids=np.take_along_axis(tokens[-1], frontier, axis=1).reshape(-1),
                hidden=hidden.reshape(batch * k, -1),
                positions=np.repeat(np.array(start, np.int32) + (level - 1), k),
                ancestor_bits=bits.reshape(batch * k, -1).view(np.int32),
                logit_rows=self._counter.range(0, batch * k),
            )
            hidden = out.reshape(batch, k, -1)
            parents.append(np.repeat(frontier + offset, k, axis=1))
            offset += tokens[-1].shape[1]
            frontier_score = np.take_along_axis(scores[-1], frontier, axis=1)
            noise = self._noise(sequences, [level + 1] * k)
            children = self._expand(logits, frontier_score, k, noise)
            tokens.append(children["tokens"].copy())
            scores.append(children["scores"].copy())
        self._discard_tree(sequences)
        return self._best_nodes(
            sequences,
            tokens=np.concatenate(tokens, axis=1),
            scores=np.concatenate(scores, axis=1),
            parents=np.concatenate(parents, axis=1),
            draft_tokens=_scalar(shape.draft_tokens),
        )

    def _best_nodes(
        self, sequences: Sequence[SequenceState], **candidates: np.ndarray
    ) -> DraftTrees:
        """Return the trees of the best candidates, which the select graph chooses."""
        selected = self._executor.run(self._role["select"], candidates)
        tree_tokens = selected["tree_tokens"].copy()
        tree_tokens[:, 0] = [s.root for s in sequences]
        return DraftTrees(
            tokens=tree_tokens,
            parents=selected["tree_parents"],
            depths=selected["depths"],
            ancestor_bits=selected["ancestor_bits"],
            count=selected["count"],
            contiguous=False,
        )

    def _draft(
        self, sequences: Sequence[SequenceState], layout: RowLayout, **feeds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the draft graph once.

        Return logits [R, Vd] of ``logit_rows`` and features [T, H] of all rows.
        """
        feeds["row_start"] = layout.row_start()
        for group in self._groups:
            pages = [s.pages[group] for s in sequences]
            feeds |= cache_feeds(group, pages, layout, self._counter)
        outputs = self._executor.run(self._role["draft"], feeds)
        return outputs["draft_logits"], outputs["hidden_out"]

    def _noise(
        self, sequences: Sequence[SequenceState], levels: Sequence[int]
    ) -> SharedNoise | None:
        """Return the noise of rows that draft ``levels`` of each sequence; None without any."""
        return SharedNoise.of_levels(sequences, levels) if self._can_share_noise else None

    def _expand(
        self, logits: np.ndarray, score: np.ndarray, top_k: int, noise: SharedNoise | None
    ) -> dict[str, np.ndarray]:
        """Run the role ``expand``; with ``noise``, on the candidates that it perturbs."""
        if noise is None:
            feeds = {"logits": logits, "score": score, "top_k": _scalar(top_k)}
            return self._executor.run(self._role["expand"], feeds)
        candidates = _scalar(max(top_k, min(CANDIDATES, self._vocab)))
        feeds = {"logits": logits, "score": _root_scores(len(logits)), "top_k": candidates}
        likely = self._executor.run(self._role["expand"], feeds)
        return noise.children(likely["tokens"], likely["scores"], score, top_k)

    def _draft_length(self, sequence: SequenceState) -> int:
        return sequence.pages[self._groups[0]].length

    def _append(self, sequence: SequenceState, count: int) -> None:
        for group in self._groups:
            sequence.pages[group].append(count)

    def _discard_tree(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            for group in self._groups:
                pages = sequence.pages[group]
                pages.rewind(pages.length)


EAGLE3 = DrafterKind(_CAPABILITIES, Eagle3Drafter)


def columns_of(manifest: Manifest, layers: Sequence[int]) -> slice | np.ndarray:
    """Return the columns of aux hidden states [n, aux layers · H] that belong to ``layers``."""
    hidden, aux_layers = manifest.target.hidden, manifest.aux_layers
    if aux_layers == tuple(layers):
        return slice(None)
    first = hidden * np.array([aux_layers.index(layer) for layer in layers])
    return (first[:, None] + np.arange(hidden)).reshape(-1)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@lru_cache(maxsize=64)
def _scalar(value: int) -> np.ndarray:
    return read_only(np.array(value, np.int32))


@lru_cache(maxsize=64)
def _root_scores(batch: int) -> np.ndarray:
    return read_only(np.zeros((batch, 1), np.float32))


@lru_cache(maxsize=64)
def _no_bits(rows: int) -> np.ndarray:
    return read_only(np.zeros((rows, 1), np.int32))
