"""A lossy mode: one object that requests properties of steps and receives their results.

If steps stay on the device, the host requests one before it knows the tokens of the steps in
flight, and assumes their maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.request import SequenceState


class Verified(NamedTuple):
    """The tokens that a target pass samples at each slot [B, N+1] of the trees, and the paths.

    ``path`` [B, D+1] has the accepted slots (padded with -1), and ``accepted`` [B] the number of
    draft tokens among them. ``root_row`` [B] is the row of each tree's root among the T rows of the
    pass, and ``row_sampled`` [T] the token sampled at each row. ``outputs`` are the graph's, valid
    until its next run. ``checked``: a mode verifies the trees twice, and this pass is the second or
    the ``trial`` before it.
    """

    sampled: np.ndarray
    logprob: np.ndarray
    path: np.ndarray
    accepted: list[int]
    root_row: np.ndarray
    row_sampled: np.ndarray
    outputs: Mapping[str, np.ndarray]
    checked: bool
    trial: bool


@dataclass(frozen=True)
class StepAhead:
    """The next step: its sequences by row, its draft, and a bound on the steps in flight.

    ``rows`` may have gaps, where prompts are still in prefill. The steps in flight emit up to
    ``most_emitted`` tokens for each sequence. ``proposal_lengths`` is the number of proposed tokens
    by row, if the host proposes the drafts as chains. ``row_depths`` is the number of verified
    levels by row, in a ragged step.
    """

    rows: Mapping[int, SequenceState]
    shape: DraftShape | None
    most_emitted: int
    proposal_lengths: Mapping[int, int] | None = None
    row_depths: Mapping[int, int] | None = None

    @property
    def batch(self) -> int:
        """The number of rows of a step that includes all sequences."""
        return 1 + max(self.rows)

    @property
    def depth(self) -> int:
        """The number of levels of the draft tree."""
        return 0 if self.shape is None else self.shape.draft_depth

    def depth_of(self, row: int) -> int:
        """Return the number of levels of one sequence's draft tree."""
        depths = self.row_depths if self.proposal_lengths is None else self.proposal_lengths
        return self.depth if depths is None else depths[row]

    def row_counts(self, batch: int) -> np.ndarray:
        """Return the rows of each sequence of a ragged step, int32 [batch]; 1 for other rows."""
        counts = np.ones(batch, np.int32)
        for row in self.rows:
            counts[row] += self.depth_of(row)
        return counts

    def proposed(self, row: int, max_emitted: int) -> int:
        """Return the number of draft nodes of a row's sequence that may emit up to ``max_emitted``
        tokens.

        In a chain, deeper nodes are not counted. In a tree all nodes are counted, since only the
        device knows their levels.
        """
        if self.shape is None or max_emitted < 1:
            return 0
        if self.shape.draft_top_k > 1:
            return self.shape.draft_tokens
        return min(self.depth_of(row), max_emitted)


@dataclass(frozen=True)
class ModeRequest:
    """The properties of a step's program that a mode requires.

    ``reverified`` is the number of rows for re-verified tokens, None if the program also selects no
    views (SpecPV). With ``sparse``, rows may attend to selected tokens; with ``checks``, the tree
    is verified twice (DSA).
    """

    reverified: int | None = None
    sparse: bool = False
    checks: bool = False


_NO_REQUEST = ModeRequest()


def joined(mode_requests: Sequence[ModeRequest]) -> ModeRequest:
    """Return a request that satisfies all modes of a step."""
    if not mode_requests:
        return _NO_REQUEST
    return ModeRequest(
        reverified=next((p.reverified for p in mode_requests if p.reverified is not None), None),
        sparse=any(p.sparse for p in mode_requests),
        checks=any(p.checks for p in mode_requests),
    )


class DeviceMode(Protocol):
    """The state of one mode for all sequences of a loop whose steps stay on the device."""

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Add a sequence, in this row, whose prompt is in the cache."""
        ...

    def expected(self, ahead: StepAhead) -> ModeRequest:
        """Return the request of a probable first step, so that its program can be loaded."""
        ...

    def request_step(self, ahead: StepAhead) -> ModeRequest:
        """Decide how each sequence takes part in the next step, and write this to the device."""
        ...

    def received(
        self, sequence: SequenceState, mode_request: ModeRequest, result: StepResult, row: int
    ) -> None:
        """Receive a step's results, before the sequence's length is updated."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Forget a finished sequence."""
        ...


@dataclass(frozen=True)
class HostModeRequest:
    """What a mode requires of a step on the host.

    ``chain_start`` is the first position of each sequence whose tokens are re-verified, as a chain
    before its tree; None if no mode re-verifies (SpecPV). With ``checks`` the trees are verified
    twice, the first time in a trial whose result is not emitted (DSA).
    """

    chain_start: Sequence[int] | None = None
    checks: bool = False


class HostMode(Protocol):
    """The state of one mode for all sequences of a loop whose roles the host runs."""

    @property
    def groups(self) -> Sequence[str]:
        """The cache groups for which the mode provides the inputs of rows."""
        ...

    def begin(self, sequence: SequenceState) -> None:
        """Add a sequence before its prefill."""
        ...

    def request_step(
        self, sequences: Sequence[SequenceState], nodes: Sequence[int]
    ) -> HostModeRequest:
        """Decide how each sequence takes part in the next step, by the nodes below its root."""
        ...

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        mode_request: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """Return the mode's inputs of a target pass. ``mode_request`` is None for prompt chunks."""
        ...

    def received(
        self, sequences: Sequence[SequenceState], mode_request: HostModeRequest, verified: Verified
    ) -> None:
        """Receive the results of a pass or trial, before the sequences' lengths are updated."""
        ...

    def reverifies_from(self, sequence: SequenceState) -> int:
        """Return the first position that a later step may re-verify, or the length if none is."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Forget a finished sequence."""
        ...
