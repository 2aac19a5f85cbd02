"""DFlash and JetSpec: one pass drafts a block of mask tokens after the newest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, cache_feeds
from specbuild.runtime.draft.drafter import DrafterKind, DrafterParts
from specbuild.runtime.draft.eagle3 import EAGLE3
from specbuild.runtime.draft.one_pass import OnePassDrafter
from specbuild.runtime.draft.tree import DraftTrees, pack_bits
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState

_CAPABILITIES = replace(EAGLE3.capabilities, name="dflash", passes="one")


class DFlashDrafter(OnePassDrafter):
    """Writes keys and values of accepted tokens once, and runs a block of queries over them.

    The rows of the block occupy tree slots. Each row drafts one level; the root's row drafts level
    1 in some drafts, and nothing in others. Each row attends to all accepted tokens. Within the
    block it attends to all rows, or in a causal draft to itself and earlier rows. A non-causal
    block always runs at its full size, as in training.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts, _CAPABILITIES)
        assert isinstance(parts.record.geometry, DFlashGeometry)
        self._geometry = parts.record.geometry

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return a chain of the most likely tokens, or the best nodes of a tree."""
        depth = min(shape.draft_depth, shape.draft_tokens)
        counts = [self._pending[s.index].count for s in sequences]
        if sum(counts) <= self._max_rows:
            self._ingest_rows(sequences, counts)
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                self._ingest(sequence, count)
        logits = self._block(sequences, depth)
        return self._trees(sequences, logits, shape, depth)

    def _ingest_rows(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Write keys and values of pending rows, each at the position of its token."""
        pending = [self._pending[s.index] for s in sequences]
        first = [self._draft_length(s) for s in sequences]
        for sequence, count in zip(sequences, counts, strict=True):
            self._append(sequence, count)
        layout = RowLayout(first, counts, [f + n for f, n in zip(first, counts, strict=True)])
        feeds = {
            "captured": np.concatenate([p.first(n) for p, n in zip(pending, counts, strict=True)]),
            "positions": self._counter.ranges(first, counts),
        }
        for group in self._groups:
            pages = [s.pages[group] for s in sequences]
            inputs = cache_feeds(group, pages, layout, self._counter)
            feeds[f"{group}.write_slot"] = inputs[f"{group}.write_slot"]
        self._executor.run(self._role["draft_fuse"], feeds)
        self._committed(sequences, first, counts)

    def _block(self, sequences: Sequence[SequenceState], depth: int) -> np.ndarray:
        """Return logits [B·depth, V] of the rows of each block that draft ``depth`` levels."""
        d, batch = self._geometry, len(sequences)
        rows = d.block_rows(depth)
        first = [self._draft_length(s) for s in sequences]
        for sequence in sequences:
            self._append(sequence, rows)
        ids = np.full((batch, rows), d.mask_token, np.int32)
        ids[:, 0] = [s.root for s in sequences]
        mask = np.tri(rows, dtype=bool) if d.causal else np.ones((rows, rows), bool)
        first_rows = np.arange(batch, dtype=np.int32)[:, None] * rows
        layout = RowLayout(first, [rows] * batch, first)
        feeds: dict[str, np.ndarray] = {
            "token_ids": ids.reshape(-1),
            "positions": self._counter.ranges(first, layout.count),
            "row_start": layout.row_start(),
            "ancestor_bits": np.tile(pack_bits(mask), (batch, 1)),
            "logit_rows": (first_rows + self._counter.range(d.first_row, depth)).reshape(-1),
        }
        for group in self._groups:
            pages = [s.pages[group] for s in sequences]
            feeds |= cache_feeds(group, pages, layout, self._counter)
        logits = self._executor.run(self._role["draft"], feeds)["draft_logits"]
        self._discard_tree(sequences)
        return logits


DFLASH = DrafterKind(_CAPABILITIES, DFlashDrafter)
