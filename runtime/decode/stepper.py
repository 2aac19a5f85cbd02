"""What the decoding loop asks of a machine: prompts into the caches, and speculative steps.

The host stepper computes a step when it is started; the device stepper queues it, so that two are
in flight at once and the device never waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class NewTokens:
    """What a launch gave one sequence: (token, natural log-probability) in order.

    The first ``accepted`` tokens were drafts.
    """

    sequence: SequenceState
    tokens: Sequence[tuple[int, float]]
    accepted: int = 0


@dataclass(frozen=True)
class StepDone:
    """A step is through: what it gave, and what the draft policy learns of it.

    Sequences that ended while the step was in flight have no part in ``emitted``. ``outcome`` is
    None where none is left.
    """

    emitted: Sequence[NewTokens]
    outcome: StepOutcome | None


class Stepper(Protocol):
    """Runs prompts and steps for one loop. Calls come from one thread, in the loop's order."""

    @property
    def most_in_flight(self) -> int:
        """Steps that may be started before the oldest is received."""
        ...

    @property
    def in_flight(self) -> int:
        """Steps started and not received."""
        ...

    def open(self) -> None:
        """Takes the machine; nothing of an earlier loop is left on it."""
        ...

    def admit(self, sequence: SequenceState) -> None:
        """A sequence has its pages and is about to be read."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """A sequence is done, or was aborted. Steps in flight may still name it."""
        ...

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """The loop ends with these sequences unfinished."""
        ...

    def outlook(self, sequences: Sequence[SequenceState]) -> Outlook:
        """What is known before the next step of these sequences."""
        ...

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """One launch of prompt chunks; only with no step in flight."""
        ...

    def prepare_step(self, shape: DraftShape | None) -> None:
        """While prompts are read, readies the step that comes behind them."""
        ...

    def receive_prompts(self) -> list[NewTokens]:
        """The first token of each prompt that the launch ended."""
        ...

    def start(
        self, sequences: Sequence[SequenceState], shape: DraftShape | None, outlook: Outlook
    ) -> None:
        """Starts draft → verify → accept → commit; ``shape`` None decodes without a draft."""
        ...

    def receive(self) -> StepDone:
        """What the oldest step in flight gave."""
        ...

    def settle(self) -> None:
        """What :meth:`receive_prompts` or :meth:`receive` gave has been emitted."""
        ...
