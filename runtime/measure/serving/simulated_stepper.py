"""A stepper whose launches take the time that a table says, and nothing else."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.runtime.decode.scheduler import Chunk
from specbuild.runtime.decode.stepper import LaunchResult, NewTokens
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import ProposedDepths
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.request import SequenceState

_TOKEN = (0, 0.0)


@dataclass
class Clock:
    """The time of a simulation, in seconds from its start, and how long launches ran."""

    now_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True)
class _Launch:
    """``ends_s`` on the clock; prompts have chunks, steps have sequences."""

    ends_s: float
    chunks: Sequence[Chunk] = ()
    sequences: Sequence[SequenceState] = ()
    shape: DraftShape | None = None
    step_context: StepContext | None = None
    step_s: float = 0.0


class SimulatedStepper:
    """Launches follow each other on one machine; up to ``max_in_flight`` are queued.

    A draft's level is accepted with the chance of its position in ``acceptance``, once those before
    it were; levels behind the last have the last chance.
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
        """Launches started and not received."""
        return len(self._launches)

    def open(self) -> None:
        """Nothing is taken."""

    def admit(self, sequence: SequenceState) -> None:
        """The scheduler has counted its pages."""

    def release(self, sequence: SequenceState) -> None:
        """Launches in flight leave out who was released."""

    def grow(self, sequence: SequenceState) -> None:
        """The scheduler has counted its pages."""

    def pause(self, sequence: SequenceState) -> None:
        """A launch holds the sequences that it is given."""

    def resume(self, sequence: SequenceState) -> None:
        """As :meth:`pause`."""

    def close(self, sequences: Sequence[SequenceState]) -> None:
        """Nothing is held."""

    def after_emit(self) -> None:
        """Nothing waits for it."""

    def prepare_step(self, sequences: Sequence[SequenceState], shape: ChosenDraft) -> None:
        """What is made ready takes no time."""

    def step_context(self, sequences: Sequence[SequenceState]) -> StepContext:
        """Drafts have seen every token."""
        return StepContext(
            batch=len(sequences),
            tokens_left=max(s.tokens_left for s in sequences),
            pending_rows=0,
            context=sum(s.num_tokens for s in sequences) // len(sequences),
        )

    def start_prompts(self, chunks: Sequence[Chunk]) -> None:
        """One launch of the target over prompt rows."""
        took_s = self._costs.prompts_s([(chunk.start, chunk.count) for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.length += chunk.count
        self._launches.append(_Launch(self._after(took_s), chunks=chunks))

    def start(
        self, sequences: Sequence[SequenceState], shape: ChosenDraft, step_context: StepContext
    ) -> None:
        """A whole step."""
        assert not isinstance(shape, ProposedDepths), "nothing is offered to simulated steps"
        took_s = self._costs.step_s(shape, batch=step_context.batch, context=step_context.context)
        assert took_s is not None, "the policy asks for drafts of the table"
        for sequence in sequences:
            sequence.steps_in_flight += 1
        self._launches.append(
            _Launch(
                self._after(took_s),
                sequences=sequences,
                shape=shape,
                step_context=step_context,
                step_s=took_s,
            )
        )

    def receive(self) -> LaunchResult:
        """The clock goes on to the end of the oldest launch."""
        launch = self._launches.popleft()
        self._clock.now_s = max(self._clock.now_s, launch.ends_s)
        if launch.step_context is None:
            ended = [chunk.sequence for chunk in launch.chunks if chunk.is_last]
            return LaunchResult([NewTokens(s, [_TOKEN]) for s in ended if not s.released])
        depth = 0 if launch.shape is None else launch.shape.draft_depth
        emitted, accepted = [], []
        for sequence in launch.sequences:
            sequence.steps_in_flight -= 1
            if sequence.released:
                continue
            accepted.append(self._accepted(depth))
            taken = min(accepted[-1] + 1, sequence.tokens_left)
            sequence.length += taken
            emitted.append(NewTokens(sequence, [_TOKEN] * taken, min(accepted[-1], taken)))
        depths = [depth] * len(accepted)
        outcome = StepOutcome(launch.step_context, launch.shape, depths, accepted, launch.step_s)
        return LaunchResult(emitted, outcome if accepted else None)

    def _after(self, took_s: float) -> float:
        """When a launch that is queued now ends."""
        before_s = self._launches[-1].ends_s if self._launches else 0.0
        self._clock.busy_s += took_s
        return max(self._clock.now_s, before_s) + took_s

    def _accepted(self, depth: int) -> int:
        chances = self._acceptance
        for level in range(depth):
            if self._random.random() >= chances[min(level, len(chances) - 1)]:
                return level
        return depth
