"""Launches in flight on a device: what is known of them until their results are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from specbuild.runtime.decode.device.prefill_rows import PromptRows
from specbuild.runtime.decode.device.processor_rows import RowTopLogprobs
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.policy import ChosenDraft
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.lossy.mode import ModePlan, StepAhead, joined
from specbuild.runtime.request import SequenceState, TopLogprobs

# A result that was there before this long was waited for: the host came late, and the time between
# two results is not the step's.
_LATE_S = 50e-6


@dataclass(frozen=True)
class PromptsInFlight:
    """A launch of so many prompt tokens in flight.

    ``ending`` are the rows where a prompt ends; ``token`` and ``logprob`` are of every row.
    """

    tokens: int
    finishing: tuple[PromptRows, ...]
    token: Callable[[], np.ndarray]
    logprob: Callable[[], np.ndarray]
    top_logprobs: RowTopLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class StepInFlight:
    """A step in flight, and the rows that it found; ``chosen`` is what the policy did.

    ``extends``: the draft takes up in it what waited. ``warm``: its program had run before in this
    loop. ``plans`` are those of the lossy modes. Up to
    ``waiting`` tokens of a sequence wait for the draft behind it; None: its sequences decode apart,
    and the draft takes up none. ``top`` are their likeliest tokens, where one wants some.
    ``waited``: nothing was in flight when it started.
    """

    number: int
    ahead: StepAhead
    chosen: ChosenDraft
    step_context: Outlook
    extends: bool
    is_warm: bool
    plans: tuple[ModePlan, ...]
    pending: int | None
    top_logprobs: RowTopLogprobs | None = None
    device_was_idle: bool = False


class StepTimer:
    """Times steps by their results."""

    def __init__(self) -> None:
        self._received_s: float | None = None

    def reset(self) -> None:
        """The next result follows something else than a step."""
        self._received_s = None

    def step_time(self, flight: StepInFlight, wait_started_s: float) -> float | None:
        """The time between two results that followed directly, where it is the step's own."""
        now_s, before_s = perf_counter(), self._received_s
        on_time = now_s - wait_started_s > _LATE_S
        self._received_s = now_s if on_time else None
        # A check takes two passes, whose time is not what a step costs.
        is_step_time = on_time and flight.is_warm and not joined(flight.plans).checks
        # One that waited for the host took that time too, as every one with an offer does.
        is_step_time &= flight.ahead.offered is not None or not flight.device_was_idle
        return now_s - before_s if is_step_time and before_s is not None else None


def check_token_count(flight: StepInFlight, result: StepResult, row: int) -> None:
    """SpecbuildError where a step gave a sequence an impossible number of tokens."""
    sequence, count, accepted = flight.ahead.rows[row], result.count[row], result.accepted[row]
    if not 1 <= count <= min(accepted + 1, len(result.tokens[row]), sequence.tokens_left):
        raise SpecbuildError(
            f"step {flight.number} gave request {sequence.request.id!r} {count} tokens of "
            f"{accepted} accepted drafts with {sequence.tokens_left} wanted; build the engine again"
        )


def count_discarded(sequence: SequenceState, proposed: int) -> None:
    """A step gave a sequence nothing: its guide refused the first token, or one before it."""
    if not sequence.replay_remaining:
        sequence.counters.step(proposed=proposed, accepted=0, emitted=0)


def top_logprobs_of(
    top_logprobs: RowTopLogprobs | None, sequence: SequenceState, row: int
) -> Sequence[TopLogprobs]:
    """The likeliest tokens of a row; none where no sequence of its step wants some."""
    return () if top_logprobs is None else top_logprobs.get(sequence, row)
