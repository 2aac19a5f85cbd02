"""The interface between the decoding loop and a machine: prefill launches and speculative steps.

Launches are received in the order in which they were started. The host stepper computes a launch
when it is started. The device stepper queues it, so that two are in flight and the device never
waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.request import SequenceState, TopLogprobs


@dataclass(slots=True)
class NewTokens:
    """New tokens of one sequence from one launch, as (token, natural log-probability) in order.

    An infinite log-probability is unknown. The launch verified ``proposed`` draft tokens. The first
    ``accepted`` tokens are accepted draft tokens. ``top_logprobs`` lists the most likely tokens at
    each position, if the request asks for them. ``allowed`` counts the first tokens that a guide
    allowed before it failed. ``completes``: whether the last token completes the output for the
    guide, which the tokens before it do not; None if the guide was not asked.
    """

    sequence: SequenceState
    tokens: Sequence[tuple[int, float]]
    accepted: int = 0
    top_logprobs: Sequence[TopLogprobs] = ()
    proposed: int = 0
    allowed: int = 0
    completes: bool | None = None


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch.

    A prefill launch gives the first token of each prompt that it completes, and counts its
    ``prompt_tokens``. ``new_tokens`` has no entry for sequences that were released while the launch
    was in flight. ``outcome`` is for the draft policy. It is None for prefill, and for a step
    without remaining sequences.
    """

    new_tokens: Sequence[NewTokens]
    outcome: StepOutcome | None = None
    prompt_tokens: int = 0


class Stepper(Protocol):
    """Runs the launches of one loop. All calls come from one thread, in the loop's order."""

    @property
    def max_in_flight(self) -> int:
        """Number of launches that may be started before the oldest is received."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of launches started and not received."""
        ...

    def open(self) -> None:
        """Prepare for a loop; discard the state of an earlier loop."""
        ...

    def admit(self, sequence: SequenceState) -> None:
        """Add a sequence, which has its pages and will be prefilled."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended or was preempted. Launches in flight may refer to it."""
        ...

    def grow(self, sequence: SequenceState) -> None:
        """Use the new pages of a sequence in the next launches."""
        ...

    def pause(self, sequence: SequenceState) -> None:
        """Exclude a sequence from the steps started from now on."""
        ...

    def resume(self, sequence: SequenceState) -> None:
        """Include a paused sequence in steps again. No launch in flight refers to it."""
        ...

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """End the loop; these sequences are unfinished."""
        ...

    def step_context(self, sequences: Sequence[SequenceState]) -> StepContext:
        """Describe the next step of these sequences for the draft policy."""
        ...

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Start a prefill launch. The sequences' ``length`` includes its tokens at once."""
        ...

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: StepContext
    ) -> None:
        """Start draft → verify → accept → commit. ``shape`` None decodes without a draft."""
        ...

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """Load the first step after a prefill launch while the launch runs."""
        ...

    def receive(self) -> LaunchResult:
        """Return the result of the oldest launch in flight."""
        ...

    def after_emit(self) -> None:
        """Update caches and drafter after the tokens of :meth:`receive` were emitted."""
        ...
