"""DSA where steps stay on the device: which steps narrow attention, and what became of their lists.

The device decides row by row, by the row's position. The host says how many tokens a sequence may
choose, and launches programs that narrow as soon as a row can have reached the threshold; before
that the ones that do not, which have fewer launches and the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.dsa import EVERYTHING, DsaTally
from specbuild.runtime.executor import ResidentExecutor
from specbuild.runtime.manifest import Manifest
from specbuild.runtime.request import SequenceState
from specbuild.runtime.slots import LIST_BUDGET


class ResidentSelections:
    """The selections of the sequences of one generation, by their index."""

    def __init__(self, executor: ResidentExecutor, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._executor = executor
        self._config = manifest.dsa
        self._held: dict[int, DsaTally] = {}

    def begin(self, sequence: SequenceState, slot: int) -> None:
        """Prefill is through: the device learns what the sequence's rows may choose."""
        tally = DsaTally(self._top_k(sequence))
        sequence.tally.dsa = self._held[sequence.index] = tally
        budget = tally.top_k if tally.top_k > 0 else EVERYTHING
        self._executor.fill(LIST_BUDGET, budget, row=slot)

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def narrows(self, sequences: Sequence[SequenceState], *, ahead: int, depth: int) -> bool:
        """Whether a row of the next step may be narrowed.

        The steps in flight emit up to ``ahead`` tokens, and its tree has ``depth`` levels.
        """
        return any(
            self._top_k(s) > 0 and s.known - 1 + ahead + depth >= self._config.threshold
            for s in sequences
        )

    def received(self, sequence: SequenceState, length: int, broken: int) -> None:
        """A narrowed step after ``length`` committed tokens had so many lists broken."""
        tally = self._held[sequence.index]
        if tally.top_k > 0 and length >= self._config.threshold:
            tally.narrowed_steps += 1
        tally.broken_launches += broken > 0
        tally.broken_lists += broken

    def _top_k(self, sequence: SequenceState) -> int:
        asked = sequence.request.params.dsa_top_k
        return self._config.top_k if asked is None else asked
