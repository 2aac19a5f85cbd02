"""A stepper that computes nothing and whose launches take the times of a table."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.decode.stepper import LaunchResult, NewTokens
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import ProposedDepths
from specbuild.runtime.draft.policy import ChosenDraft, SequenceDepths, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.request import SequenceState

_TOKEN = (0, 0.0)


@dataclass
class Clock:
    """The time of a simulation, in seconds from its start, and the total time of launches."""

    now_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True)
class _Launch:
    """A launch that ends at ``ends_s`` on the clock; prompts have chunks, steps have sequences."""

    ends_s: float
    chunks: Sequence[Chunk] = ()
    sequences: Sequence[SequenceState] = ()
    shape: DraftShape | None = None
    step_context: StepContext | None = None
    step_s: float = 0.0


class SimulatedStepper:
    """Launches run one after another on one machine; up to ``max_in_flight`` are queued.

    A draft's level is accepted with the probability of its position in ``acceptance`` if the
    previous levels were; levels after the last have the last probability.
    """

    def __init__(
        self,
        costs: ServingCosts,
        clock: Clock,
        *,
        max_in_flight: int,
        acceptance: Sequence[float],
        seed: int,
    ) -> None:
        self.max_in_flight = max_in_flight
        self._costs = costs
        self._clock = clock
        self._acceptance = acceptance
        self._random = random.Random(seed)
        self._launches: deque[_Launch] = deque()

    @property
    def in_flight(self) -> int:
        """The number of launches that have started and were not received."""
        return len(self._launches)

    def open(self) -> None:
        """See :class:`Stepper`; there is nothing to allocate."""

    def admit(self, sequence: SequenceState) -> None:
        """See :class:`Stepper`; the scheduler has counted the sequence's pages."""

    def release(self, sequence: SequenceState) -> None:
        """See :class:`Stepper`; launches in flight skip a released sequence."""

    def grow(self, sequence: SequenceState) -> None:
        """See :class:`Stepper`; the scheduler has counted the sequence's pages."""

    def pause(self, sequence: SequenceState) -> None:
        """See :class:`Stepper`; each launch stores its own sequences."""

    def resume(self, sequence: SequenceState) -> None:
        """See :class:`Stepper`."""

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """See :class:`Stepper`; there is nothing to release."""

    def after_emit(self) -> None:
        """See :class:`Stepper`; nothing waits for it."""

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """See :class:`Stepper`; preparation takes no time."""

    def step_context(self, sequences: Sequence[SequenceState]) -> StepContext:
        """Return the context of a step; the draft has ingested all tokens."""
        return StepContext(
            batch=len(sequences),
            tokens_left=max(s.tokens_left for s in sequences),
            pending_rows=0,
            context=sum(s.num_tokens for s in sequences) // len(sequences),
        )

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """Start one launch of the target over prompt rows."""
        duration_s = self._costs.prompts_s([(chunk.start, chunk.count) for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.length += chunk.count
        self._launches.append(_Launch(self._after(duration_s), chunks=chunks))

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: StepContext
    ) -> None:
        """Start a complete step."""
        assert not isinstance(shape, SequenceDepths | ProposedDepths), (
            "simulated steps have a shape"
        )
        duration_s = self._costs.step_s(
            shape, batch=step_context.batch, context=step_context.context
        )
        assert duration_s is not None, "the policy asks for drafts of the table"
        for sequence in sequences:
            sequence.steps_in_flight += 1
        self._launches.append(
            _Launch(
                self._after(duration_s),
                sequences=sequences,
                shape=shape,
                step_context=step_context,
                step_s=duration_s,
            )
        )

    def receive(self) -> LaunchResult:
        """Advance the clock to the end of the oldest launch, and return its result."""
        launch = self._launches.popleft()
        self._clock.now_s = max(self._clock.now_s, launch.ends_s)
        if launch.step_context is None:
            finished = [chunk.sequence for chunk in launch.chunks if chunk.is_last]
            return LaunchResult([NewTokens(s, [_TOKEN]) for s in finished if not s.released])
        depth = 0 if launch.shape is None else launch.shape.draft_depth
        emitted, accepted = [], []
        for sequence in launch.sequences:
            sequence.steps_in_flight -= 1
            if sequence.released:
                continue
            accepted.append(self._accepted(depth))
            emitted_tokens = min(accepted[-1] + 1, sequence.tokens_left)
            sequence.length += emitted_tokens
            emitted.append(
                NewTokens(sequence, [_TOKEN] * emitted_tokens, min(accepted[-1], emitted_tokens))
            )
        depths = [depth] * len(accepted)
        outcome = StepOutcome(launch.step_context, launch.shape, depths, accepted, launch.step_s)
        return LaunchResult(emitted, outcome if accepted else None)

    def _after(self, duration_s: float) -> float:
        """Return the end of a launch that is queued now."""
        before_s = self._launches[-1].ends_s if self._launches else 0.0
        self._clock.busy_s += duration_s
        return max(self._clock.now_s, before_s) + duration_s

    def _accepted(self, depth: int) -> int:
        chances = self._acceptance
        for level in range(depth):
            if self._random.random() >= chances[min(level, len(chances) - 1)]:
                return level
        return depth
