"""A lossy mode: one object that plans steps and is called with their results.

Where steps stay on the device, the host plans one before it knows what the steps in flight emit,
and reckons with the most that they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class StepAhead:
    """The next step: the sequences that take part by row, its draft, and what may come before it.

    Rows between theirs are passed over: prompts are still read there. The steps in flight emit up
    to ``most_emitted`` tokens for each sequence. ``proposal_lengths``: the number of proposed
    tokens by row, if the host proposes the drafts as chains.
    """

    rows: Mapping[int, SequenceState]
    shape: DraftShape | None
    most_emitted: int
    proposal_lengths: Mapping[int, int] | None = None

    @property
    def batch(self) -> int:
        """The rows of a step that reaches them all."""
        return 1 + max(self.rows)

    @property
    def depth(self) -> int:
        """Levels of the draft tree."""
        return 0 if self.shape is None else self.shape.draft_depth

    def depth_of(self, row: int) -> int:
        """Levels of the draft tree of one sequence."""
        return self.depth if self.proposal_lengths is None else self.proposal_lengths[row]

    def proposed(self, row: int, most: int) -> int:
        """Drafts of the sequence of a row, of which up to ``most`` may be emitted.

        A chain's deeper ones count for none. Which levels a tree's nodes stand on is known on the
        device alone: all of them count.
        """
        if self.shape is None or most < 1:
            return 0
        lengths = self.proposal_lengths
        nodes = self.shape.draft_tokens if lengths is None else lengths[row]
        return nodes if self.shape.draft_top_k > 1 else min(nodes, most)


@dataclass(frozen=True)
class ModeRequest:
    """What a mode asks of a step's program.

    ``reverified``: rows of tokens that are verified once more, over everything, None where the
    program chooses no views either (SpecPV). ``sparse``: rows may attend to what indexers choose;
    ``checks``: the tree is verified both ways (DSA).
    """

    reverified: int | None = None
    sparse: bool = False
    checks: bool = False


def joined(plans: Sequence[ModeRequest]) -> ModeRequest:
    """What all modes ask of one step."""
    return ModeRequest(
        reverified=next((p.reverified for p in plans if p.reverified is not None), None),
        sparse=any(p.sparse for p in plans),
        checks=any(p.checks for p in plans),
    )


class DeviceMode(Protocol):
    """One mode's state of all sequences of a loop."""

    def begin(self, sequence: SequenceState, row: int) -> None:
        """The sequence's prompt is in the cache; it stands in this row."""
        ...

    def expected(self, ahead: StepAhead) -> ModeRequest:
        """What a first step will ask for, for what can be made ready; nothing is settled."""
        ...

    def plan(self, ahead: StepAhead) -> ModeRequest:
        """Settles how each sequence takes part in the next step; the device is told."""
        ...

    def received(
        self, sequence: SequenceState, plan: ModeRequest, result: StepResult, row: int
    ) -> None:
        """A step is through; the sequence's length is still that of before it."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        ...


@dataclass(frozen=True)
class HostModeRequest:
    """What a mode asks of a step on the host.

    ``chain_start``: the position from which on each sequence's tokens are re-verified, as a chain
    in front of its tree; None where none are (SpecPV). ``checks``: the trees are verified both
    ways, first in a trial that does not count (DSA).
    """

    chain_start: Sequence[int] | None = None
    checks: bool = False


class HostMode(Protocol):
    """The same where the host runs every step role by role."""

    @property
    def groups(self) -> Sequence[str]:
        """The cache groups whose rows the mode places itself."""
        ...

    def begin(self, sequence: SequenceState) -> None:
        """The sequence's prompt is about to be read."""
        ...

    def plan(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> HostModeRequest:
        """Settles how each takes part in the next step, with so many nodes below its root."""
        ...

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        plan: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """The mode's inputs of a target pass; ``plan`` None: the rows are chunks of prompts."""
        ...

    def received(
        self, sequences: Sequence[SequenceState], plan: HostModeRequest, verified: Verified
    ) -> None:
        """A pass is through, a trial too; the sequences' lengths are still those of before it."""
        ...

    def reverifies_from(self, sequence: SequenceState) -> int:
        """The first position that a later step may enter again: the length where none is."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        ...
