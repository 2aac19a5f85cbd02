"""P-EAGLE (arXiv 2602.01469): one causal pass drafts all positions of a chain or tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.draft.drafter import DrafterKind, DrafterParts
from specbuild.runtime.draft.eagle3 import EAGLE3
from specbuild.runtime.draft.one_pass import OnePassDrafter
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState

_CAPABILITIES = replace(EAGLE3.capabilities, name="p-eagle", passes="one")


class PEagleDrafter(OnePassDrafter):
    """Ingests accepted tokens as EAGLE3 does, and drafts at mask rows after them.

    The last accepted row drafts the first position. Each further position has a mask row: the mask
    token and its learned hidden state. The cache entries of mask rows are discarded.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts, _CAPABILITIES)
        assert isinstance(parts.record.geometry, PEagleGeometry)
        self._mask_token = parts.record.geometry.mask_token

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return a chain of the most likely tokens, or the best nodes of a tree."""
        depth = min(shape.draft_depth, shape.draft_tokens)
        counts = [self._pending[s.index].count for s in sequences]
        if sum(counts) + len(sequences) * (depth - 1) > self._max_rows:
            for sequence, count in zip(sequences, counts, strict=True):
                self._ingest(sequence, count - 1)
            counts = [1] * len(sequences)
        logits = self._pass(sequences, counts, depth)
        return self._trees(sequences, logits, shape, depth)

    def _pass(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], depth: int
    ) -> np.ndarray:
        """Run the draft over each sequence's pending rows and ``depth`` − 1 mask rows after them.

        Return logits [B·depth, Vd]: for each sequence, of its last pending row and its mask rows.
        """
        pending = [self._pending[s.index] for s in sequences]
        aux_hidden = np.concatenate([p.first(n) for p, n in zip(pending, counts, strict=True)])
        fused = self._executor.run(self._role["draft_fuse"], {"captured": aux_hidden})
        starts = np.cumsum([0, *counts])
        mask_hidden = np.repeat(fused["mask_hidden"], depth - 1, axis=0)
        hidden = [
            part
            for start, stop in pairwise(starts)
            for part in (fused["hidden"][start:stop], mask_hidden)
        ]
        mask_ids = np.full(depth - 1, self._mask_token, np.int32)
        first = [self._draft_length(s) for s in sequences]
        ids = [
            part
            for s, f, n in zip(sequences, first, counts, strict=True)
            for part in (s.ids[f + 1 : f + n + 1], mask_ids)
        ]
        rows = [n + depth - 1 for n in counts]
        layout = RowLayout(first, rows, [f + n for f, n in zip(first, rows, strict=True)])
        for sequence, count in zip(sequences, rows, strict=True):
            self._append(sequence, count)
        logit_rows = np.array(layout.row_start()[1:, None] - np.arange(depth, 0, -1), np.int32)
        logits, _ = self._draft(
            sequences,
            layout,
            token_ids=np.concatenate(ids),
            hidden=np.concatenate(hidden),
            positions=self._counter.ranges(first, rows),
            ancestor_bits=np.zeros((layout.rows, 1), np.int32),
            logit_rows=logit_rows.reshape(-1),
        )
        self._committed(sequences, first, counts)
        self._discard_tree(sequences)
        return logits


P_EAGLE = DrafterKind(_CAPABILITIES, PEagleDrafter)
