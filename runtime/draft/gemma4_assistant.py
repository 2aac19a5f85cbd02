"""Assistants (Gemma 4): they draft level by level over the target's caches, without their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout, cache_feeds
from specbuild.runtime.draft.drafter import DrafterKind, DrafterParts
from specbuild.runtime.draft.eagle3 import EAGLE3, Eagle3Drafter
from specbuild.runtime.request import SequenceState

_CAPABILITIES = replace(EAGLE3.capabilities, name="gemma4-assistant")


class AssistantDrafter(Eagle3Drafter):
    """Runs an assistant on the state of the newest committed token.

    The first level reads this state and the root, each further level the state and the token of its
    parent. All rows have the root's position, and attend to all committed tokens but to no draft
    token. So trees need no slots, and the draft's cache group only counts tokens.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts, _CAPABILITIES)
        self._states: dict[int, np.ndarray] = {}

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Keep the state of the newest token."""
        assert aux_hidden is not None
        self._states[sequence.index] = aux_hidden[-1:, self._columns].copy()
        (group,) = self.cache_groups
        pages, count = sequence.pages[group], len(aux_hidden)
        pages.append(count)
        sequence.publish(pages.length + count, draft=group)
        pages.commit(pages.length + count)

    def release(self, sequence: SequenceState) -> None:
        """Discard the sequence's state."""
        self._states.pop(sequence.index, None)

    def _first_level(self, sequences: Sequence[SequenceState]) -> tuple[np.ndarray, np.ndarray]:
        states = np.concatenate([self._states[s.index] for s in sequences])
        fused = self._executor.run(self._role["draft_fuse"], {"captured": states})
        batch = len(sequences)
        return self._draft(
            sequences,
            RowLayout([0] * batch, [1] * batch, [0] * batch),
            token_ids=np.array([s.root for s in sequences], np.int32),
            hidden=fused["hidden"],
            logit_rows=self._counter.range(0, batch),
        )

    def _draft(
        self, sequences: Sequence[SequenceState], layout: RowLayout, **feeds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Eagle3Drafter`; of ``layout``, only the number of rows applies."""
        lengths = [sequence.length for sequence in sequences]
        feeds["positions"] = np.repeat(np.array(lengths, np.int32), layout.count)
        feeds["ancestor_bits"] = np.zeros((layout.rows, 1), np.int32)
        feeds["row_start"] = layout.row_start()
        # Rows at tree slots without ancestor bits attend to all committed tokens.
        rows = RowLayout(lengths, layout.count, lengths)
        for group in self._groups:
            pages = [sequence.pages[group] for sequence in sequences]
            feeds |= cache_feeds(group, pages, rows, self._counter)
        outputs = self._executor.run(self._role["draft"], feeds)
        return outputs["draft_logits"], outputs["hidden_out"]

    def _append(self, sequence: SequenceState, count: int) -> None:
        """Do nothing: drafted rows take no slots."""

    def _discard_tree(self, sequences: Sequence[SequenceState]) -> None:
        """Do nothing: drafted rows have no slots."""


ASSISTANT = DrafterKind(_CAPABILITIES, AssistantDrafter)
