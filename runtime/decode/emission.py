"""Turns target tokens into events: text, finish reasons and statistics, for every loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, isnan

import numpy as np

from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.decode.stepper import NewTokens
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.records import FinishReason, RunRecord
from specbuild.runtime.request import Event, FinishEvent, Request, SequenceState, TokenEvent
from specbuild.runtime.statistics import RunCounters
from specbuild.runtime.text.stream import TextStream

TextStreams = Callable[[Request], TextStream | None]


class Emission:
    """Appends new tokens to sequences and creates their events.

    ``max_depth`` is the depth of the deepest draft that a step may verify.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        *,
        max_depth: int,
        text_stream: TextStreams,
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_depth = max_depth
        self.text_stream = text_stream

    def admit(self, index: int, request: Request, pages: dict[str, SequencePages]) -> SequenceState:
        """Create the state of a request at its first admission, and start its clock."""
        ids = np.zeros(len(request.prompt_ids) + request.token_budget, np.int32)
        ids[: len(request.prompt_ids)] = request.ids
        counters = RunCounters(self._max_depth)
        if request.grammar is not None:
            counters.masked_tokens = 0
        return SequenceState(
            request=request,
            index=index,
            ids=ids,
            pages=pages,
            counters=counters,
            text=self.text_stream(request),
            num_tokens=len(request.prompt_ids),
            guide=None if request.grammar is None else request.grammar.begin(),
        )

    def restore(self, preempted: SequenceState, pages: dict[str, SequencePages]) -> SequenceState:
        """Create the state of a preempted request, which replays its tokens without events."""
        return SequenceState(
            request=preempted.request,
            index=preempted.index,
            ids=preempted.ids,
            pages=pages,
            counters=preempted.counters,
            text=preempted.text,
            num_tokens=len(preempted.request.prompt_ids),
            replay_until=max(preempted.num_tokens, preempted.replay_until),
            logprobs=preempted.logprobs,
            top_logprobs=preempted.top_logprobs,
            guide=preempted.guide,
            held_events=preempted.held_events,
        )

    def append(self, new: NewTokens) -> list[TokenEvent]:
        """Append tokens until one finishes the request; return their events in order.

        An infinite log-probability is unknown: the int8-prefiltered head chose the token. Tokens
        that are replayed after a preemption give no events. If the guide failed, the request ends
        after the tokens that the guide had allowed. Raises SpecbuildError if a replayed token
        differs from the token emitted before, or if a log-probability is NaN because the target's
        logits are NaN.
        """
        sequence, tokens = new.sequence, new.tokens
        if sequence.guide is not None and sequence.guide.failure is not None:
            tokens = tokens[: new.allowed]
            sequence.finish_reason = "guide_failed"
        events: list[TokenEvent] = []
        decoding = sequence.num_tokens > sequence.prompt_tokens
        num_replayed, accepted, top = 0, new.accepted, new.top_logprobs
        if sequence.replay_until > sequence.num_tokens:
            num_replayed = _skip_replayed(sequence, tokens)
            tokens, accepted = tokens[num_replayed:], max(0, accepted - num_replayed)
            top = top[num_replayed:]
        if tokens and not decoding:
            sequence.counters.first_token()
        for i, (token, logprob) in enumerate(tokens):
            value: float | None = logprob
            if not isfinite(logprob):
                _require_number(sequence, logprob)
                value = None
            sequence.ids[sequence.num_tokens] = token
            sequence.num_tokens += 1
            sequence.logprobs.append(value)
            completes = new.completes and i == len(tokens) - 1
            reason, text = self._finish_reason(sequence, token, completes)
            event = TokenEvent(sequence.index, token, text, i < accepted, value)
            events.append(event)
            if top:
                event.top_logprobs = top[i]
                sequence.top_logprobs.append(top[i])
            if reason is not None:
                sequence.finish_reason = reason
                break
        if not decoding and events:
            events[0].cached_tokens = sequence.counters.cached_tokens
        elif tokens:
            sequence.counters.step(
                proposed=max(0, new.proposed - num_replayed) if new.proposed else 0,
                accepted=min(accepted, len(events)) if accepted else 0,
                emitted=len(events),
            )
        return events

    def release_held(self, sequence: SequenceState) -> list[Event]:
        """Return the events that were held for a mask. The guide may finish the request."""
        held, sequence.held_events = sequence.held_events, []
        assert sequence.guide is not None
        if sequence.guide.failure is not None:
            sequence.finish_reason = "guide_failed"
        elif sequence.guide.complete(sequence.output):
            sequence.finish_reason = "stop"
            last = held[-1] if held else None
            if sequence.text is not None and isinstance(last, TokenEvent):
                last.text += sequence.text.finish()
        return held

    def _finish_reason(
        self, sequence: SequenceState, token: int, completes: bool | None
    ) -> tuple[FinishReason | None, str]:
        """Return why this token finishes the request, or None, and the text to emit.

        ``completes``: whether the guide's output is complete; None to ask the guide.
        """
        params, stream, guide = sequence.request.params, sequence.text, sequence.guide
        reason: FinishReason | None = None
        if token in self._eos_token_ids and not params.ignore_eos:
            reason = "eos"
        elif token in params.stop_token_ids:
            reason = "stop"
        text = ""
        if stream is not None and (reason is None or params.include_stop_str_in_output):
            text = stream.push(token)
        if reason is None:
            if completes is None and guide is not None:
                completes = guide.complete(sequence.output)
            if completes or (stream is not None and stream.stopped):
                reason = "stop"
            elif sequence.num_tokens == sequence.max_tokens:
                reason = "length"
        if reason is not None and stream is not None:
            text += stream.finish()
            reason = "stop" if stream.stopped else reason
        return reason, text


def _require_number(sequence: SequenceState, logprob: float) -> None:
    """Raise SpecbuildError if a log-probability is not a number."""
    if isnan(logprob):
        raise SpecbuildError(
            f"prompt {sequence.request.id!r}: the target's logits of output token "
            f"{sequence.num_output_tokens + 1} are not numbers; check the checkpoint's weights"
        )


def _skip_replayed(sequence: SequenceState, tokens: Sequence[tuple[int, float]]) -> int:
    """Skip tokens that were emitted before a preemption; return their number."""
    count = min(sequence.replay_remaining, len(tokens))
    for token, _ in tokens[:count]:
        emitted_before = int(sequence.ids[sequence.num_tokens])
        if token != emitted_before:
            raise SpecbuildError(
                f"prompt {sequence.request.id!r}: internal error: output token "
                f"{sequence.num_output_tokens + 1} was {emitted_before}, and replay after a "
                f"preemption produced {token}; please report it, and run with guaranteed-no-evict"
            )
        sequence.num_tokens += 1
    return count


def finish_unstarted(
    index: int, request: Request, text_stream: TextStreams, reason: FinishReason = "abort"
) -> FinishEvent:
    """Create the finish event of a request that was aborted or expired before admission."""
    record = RunRecord(
        id=request.id,
        prompt_ids=request.prompt_ids,
        output_ids=(),
        text=None if text_stream(request) is None else "",
        finish_reason=reason,
        stats=RunCounters(0).stats(len(request.prompt_ids)),
        logprobs=(),
        top_logprobs=() if request.params.top_logprobs else None,
    )
    return FinishEvent(index, record)
