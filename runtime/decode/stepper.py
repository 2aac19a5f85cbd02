"""What the decoding loop asks of a machine: prompts into the caches, and speculative steps.

Both are launches, which are received in the order in which they were started. The host stepper
computes a launch when it is started; the device stepper queues it, so that two are in flight at
once and the device never waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.request import SequenceState, TopLogprobs


@dataclass(frozen=True)
class NewTokens:
    """What a launch gave one sequence: (token, natural log-probability) in order.

    An infinite log-probability is unknown. The first ``accepted`` tokens were drafts, of
    ``proposed`` that the launch verified. ``top_logprobs`` has the likeliest tokens for each,
    where the request asks for some. Where its guide failed, it had allowed the first ``allowed``.
    """

    sequence: SequenceState
    tokens: Sequence[tuple[int, float]]
    accepted: int = 0
    top_logprobs: Sequence[TopLogprobs] = ()
    proposed: int = 0
    allowed: int = 0


@dataclass(frozen=True)
class LaunchResult:
    """A launch is through: what it gave, and what the draft policy learns of it.

    Of a launch of prompts that is the first token of each prompt that it ended. Sequences that
    were released while the launch was in flight have no part in ``emitted``. ``outcome`` is None of
    prompts, and of a step where no sequence is left. It read ``prompt_tokens``.
    """

    new_tokens: Sequence[NewTokens]
    outcome: StepOutcome | None = None
    prompt_tokens: int = 0


class Stepper(Protocol):
    """Runs prompts and steps for one loop. Calls come from one thread, in the loop's order."""

    @property
    def max_in_flight(self) -> int:
        """Launches that may be started before the oldest is received."""
        ...

    @property
    def in_flight(self) -> int:
        """Launches started and not received."""
        ...

    def open(self) -> None:
        """Takes the machine; nothing of an earlier loop is left on it."""
        ...

    def admit(self, sequence: SequenceState) -> None:
        """A sequence has its pages and is about to be read."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """A sequence is done, aborted or preempted. Launches in flight may still name it."""
        ...

    def grow(self, sequence: SequenceState) -> None:
        """A sequence has more pages: for what is started from now on."""
        ...

    def pause(self, sequence: SequenceState) -> None:
        """Steps that are started from now on leave a sequence as it is."""
        ...

    def resume(self, sequence: SequenceState) -> None:
        """Steps decode a paused sequence again. None in flight names it."""
        ...

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """The loop ends with these sequences unfinished."""
        ...

    def step_context(self, sequences: Sequence[SequenceState]) -> Outlook:
        """What is known before the next step of these sequences."""
        ...

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Starts one launch of prompt chunks; their sequences are that much longer at once."""
        ...

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: Outlook
    ) -> None:
        """Starts draft → verify → accept → commit; ``shape`` None decodes without a draft."""
        ...

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """While prompts are read, readies the step that comes behind them."""
        ...

    def receive(self) -> LaunchResult:
        """What the oldest launch in flight gave."""
        ...

    def after_emit(self) -> None:
        """What :meth:`receive` gave has been emitted."""
        ...
