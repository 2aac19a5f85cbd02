"""Launches in flight on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from specbuild.runtime.decode.device.prefill_rows import PromptRows
from specbuild.runtime.decode.device.processor_rows import RowTopLogprobs, needs_full_logits
from specbuild.runtime.decode.stepper import NewTokens
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.lossy.mode import ModeRequest, StepAhead, joined
from specbuild.runtime.request import SequenceState, TopLogprobs

# After a shorter wait, the result was ready before the host read it, so the step is not timed.
_LATE_S = 50e-6


@dataclass(frozen=True)
class PromptsInFlight:
    """A prefill launch in flight, with ``tokens`` prompt tokens.

    ``finishing`` are the rows whose prompts end. ``token`` and ``logprob`` return values of every
    row.
    """

    tokens: int
    finishing: tuple[PromptRows, ...]
    token: Callable[[], np.ndarray]
    logprob: Callable[[], np.ndarray]
    top_logprobs: RowTopLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class StepInFlight:
    """A step in flight. ``ahead`` holds its rows, ``chosen`` the policy's choice.

    - ``extends``: the draft ingests its pending tokens in this step.
    - ``is_warm``: the program ran before in this loop, so its time counts.
    - ``mode_requests``: the requests of the lossy modes.
    - ``pending``: the most tokens per sequence that the draft has not ingested after this step;
      None for a logit-processor step.
    - ``num_masked``: how many tokens of a row are masked, for rows with a mask.
    - ``top_logprobs``: the most likely tokens, if a sequence requests them.
    - ``device_was_idle``: nothing was in flight when the step started.
    """

    number: int
    ahead: StepAhead
    chosen: ChosenDraft
    step_context: StepContext
    extends: bool
    is_warm: bool
    mode_requests: tuple[ModeRequest, ...]
    pending: int | None
    num_masked: Mapping[int, int] = field(default_factory=dict)
    top_logprobs: RowTopLogprobs | None = None
    device_was_idle: bool = False


class StepTimer:
    """Times steps by the arrival of their results."""

    def __init__(self) -> None:
        self._received_s: float | None = None

    def reset(self) -> None:
        """Forget the last result, since the next step does not directly follow it."""
        self._received_s = None

    def step_time(self, flight: StepInFlight, wait_started_s: float) -> float | None:
        """Return the time between two consecutive results; None if it includes waiting."""
        now_s, before_s = perf_counter(), self._received_s
        on_time = now_s - wait_started_s > _LATE_S
        self._received_s = now_s if on_time else None
        # A DSA check takes two passes, so its time is not that of a step.
        is_step_time = on_time and flight.is_warm and not joined(flight.mode_requests).checks
        # If the device was idle, the time includes waiting for the host. Only steps with host
        # chains always wait, so only their time counts then.
        is_step_time &= flight.ahead.proposal_lengths is not None or not flight.device_was_idle
        return now_s - before_s if is_step_time and before_s is not None else None


def check_token_count(flight: StepInFlight, result: StepResult, row: int) -> None:
    """Raise SpecbuildError if the number of tokens for a sequence is impossible."""
    sequence, count, accepted = flight.ahead.rows[row], result.count[row], result.accepted[row]
    if not 1 <= count <= min(accepted + 1, len(result.tokens[row]), sequence.tokens_left):
        raise SpecbuildError(
            f"step {flight.number} emitted {count} tokens for request {sequence.request.id!r}, "
            f"with {accepted} accepted drafts and {sequence.tokens_left} tokens left; "
            "rebuild the engine"
        )


def count_discarded(sequence: SequenceState, proposed: int) -> None:
    """Count a step whose tokens for this sequence were discarded after its guide refused one."""
    if not sequence.replay_remaining:
        sequence.counters.step(proposed=proposed, accepted=0, emitted=0)


def top_logprobs_of(
    top_logprobs: RowTopLogprobs | None, sequence: SequenceState, row: int, num_tokens: int
) -> Sequence[TopLogprobs]:
    """Return the most likely tokens at a row's tokens; empty if no sequence requests them."""
    return () if top_logprobs is None else top_logprobs.get(sequence, row, num_tokens)


def context_of(sequences: Sequence[SequenceState], rows: int = 0) -> StepContext:
    """Describe the next step of these sequences, in which the draft ingests pending tokens.

    ``rows`` is as in :class:`StepContext`.
    """
    return StepContext(
        len(sequences),
        tokens_left=max([s.max_tokens - s.num_tokens for s in sequences]),
        pending_rows=0,
        context=sum([s.num_tokens for s in sequences]) // len(sequences),
        num_sampled=sum([s.is_sampled for s in sequences]),
        full_logits=needs_full_logits(sequences),
        sequences=tuple([s.index for s in sequences]),
        rows=rows,
    )


def only_token(sequence: SequenceState, result: StepResult, row: int) -> NewTokens | None:
    """Return the token that a step without a draft gave a sequence; None if it does not count."""
    has_room = sequence.num_tokens < sequence.max_tokens
    if result.count[row] != 1 or not has_room or sequence.discarded_steps:
        return None
    return NewTokens(sequence, ((result.tokens[row][0], result.logprobs[row][0]),))


def outcome_of(
    flight: StepInFlight,
    new_tokens: Sequence[NewTokens],
    depths: Sequence[int],
    step_s: float | None,
) -> StepOutcome:
    """Return the outcome of a step for the draft policy."""
    return StepOutcome(
        flight.step_context,
        flight.chosen,
        depths,
        [new.accepted for new in new_tokens],
        step_s,
        [new.sequence.is_sampled for new in new_tokens],
        [new.sequence.index for new in new_tokens],
    )
