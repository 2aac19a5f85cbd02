"""Allocates pages on demand: before a step, sequences grow, pause, or are preempted.

A sequence is admitted with pages for the tokens it has, and grows while it decodes. Sequences are
ranked by priority, then by age. If a sequence lacks pages, the lowest-ranked running sequence is
preempted. If that is the sequence itself, it pauses instead: it keeps its pages and waits. So the
highest-ranked sequence always continues, and no sequence waits forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.request_queue import rank
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class PageChanges:
    """The sequences whose pages changed before a step, in the order in which they changed."""

    preempted: list[SequenceState] = field(default_factory=list)
    grown: list[SequenceState] = field(default_factory=list)
    paused: list[SequenceState] = field(default_factory=list)
    resumed: list[SequenceState] = field(default_factory=list)


def provide_pages(
    running: list[SequenceState], kv: KvPools, *, max_step_tokens: int
) -> PageChanges:
    """Allocate pages, by rank, to the running sequences that the next step may decode.

    A step in flight emits at most ``max_step_tokens`` tokens per sequence. Preempted sequences are
    removed from ``running``. Raises SpecbuildError if the only running sequence gets no pages.
    """
    changes = PageChanges()
    ranked = sorted(running, key=rank)
    for sequence in list(ranked):
        # A paused sequence resumes only after its steps in flight were received.
        must_wait = sequence.steps_in_flight and (
            sequence.paused or sequence.tokens_left <= sequence.valid_steps_in_flight
        )
        if sequence.released or not sequence.num_output_tokens or must_wait:
            continue
        if _grow_by_rank(sequence, ranked, kv, max_step_tokens, changes) and sequence.paused:
            sequence.paused = False
            changes.resumed.append(sequence)
    for sequence in changes.preempted:
        running.remove(sequence)
    return changes


def _grow_by_rank(
    sequence: SequenceState,
    ranked: list[SequenceState],
    kv: KvPools,
    max_step_tokens: int,
    changes: PageChanges,
) -> bool:
    """Allocate pages for a step, preempting lower-ranked sequences; return whether it has them."""
    request = sequence.request
    max_tokens = sequence.num_tokens + sequence.steps_in_flight * max_step_tokens
    tokens = min(max_tokens, len(request.prompt_ids) + request.token_budget)
    if tokens <= sequence.capacity:
        return True
    while not kv.can_grow(sequence.pages, tokens):
        if ranked[-1] is sequence:
            if len(ranked) > 1:
                _pause(sequence, changes)
                return False
            break
        _preempt(ranked.pop(), kv, changes)
    kv.grow(sequence.pages, tokens)
    sequence.capacity = kv.capacity(sequence.pages)
    changes.grown.append(sequence)
    return True


def _pause(sequence: SequenceState, changes: PageChanges) -> None:
    if not sequence.paused:
        sequence.paused = True
        changes.paused.append(sequence)


def _preempt(sequence: SequenceState, kv: KvPools, changes: PageChanges) -> None:
    sequence.released = True
    sequence.counters.preemptions += 1
    kv.release(sequence.pages)
    changes.preempted.append(sequence)
