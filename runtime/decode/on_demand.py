"""Pages on demand: who gets more before a step, who waits for them, and who gives theirs back.

A sequence is admitted with pages for what it has, and grows as it decodes. They rank by priority,
then by age: where the pages of one do not suffice the last of those that run is preempted, if it is
behind it. Else the sequence itself pauses, which keeps its pages and waits. So the first always
goes on, and nobody starves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.request_queue import rank
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class PageChanges:
    """What became of sequences before a step: each list in the order of events."""

    preempted: list[SequenceState] = field(default_factory=list)
    grown: list[SequenceState] = field(default_factory=list)
    paused: list[SequenceState] = field(default_factory=list)
    resumed: list[SequenceState] = field(default_factory=list)


def provide_pages(
    running: list[SequenceState], kv: KvPools, *, max_step_tokens: int
) -> PageChanges:
    """Grows those of ``running``, by rank, that the next step may decode.

    A step in flight emits up to ``most_emitted`` tokens. Who is preempted leaves ``running``.
    Raises SpecbuildError where one that runs alone finds no pages.
    """
    changes = PageChanges()
    ranked = sorted(running, key=rank)
    for sequence in list(ranked):
        # A paused one goes on from what its steps in flight gave: these come first.
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
    """Whether the sequence has pages for a step, by those of later ones if need be."""
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
