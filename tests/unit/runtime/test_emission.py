"""The events of new tokens: log-probabilities, accepted drafts, cached tokens, and replay."""

from __future__ import annotations

import math

import pytest

from specbuild.runtime.decode.emission import Emission
from specbuild.runtime.decode.stepper import NewTokens
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import Event, GenerateParams, Request, SequenceState, TokenEvent
from specbuild.runtime.sampling import SamplingParams


def begun(emission: Emission, params: GenerateParams) -> SequenceState:
    return emission.admit(0, Request(id="a", prompt_ids=(5, 6), params=params, token_budget=4), {})


def test_an_unknown_logprob_is_none_in_events_and_in_the_record() -> None:
    emission = Emission((), max_depth=0, text_stream=lambda _: None)
    sequence = begun(emission, GenerateParams(max_new_tokens=4))
    events = emission.append(NewTokens(sequence, [(7, -0.5), (8, math.inf)]))
    assert [e.logprob for e in events if isinstance(e, TokenEvent)] == [-0.5, None]
    assert sequence.logprobs == [-0.5, None]


def test_a_logprob_that_is_no_number_ends_the_run() -> None:
    emission = Emission((), max_depth=0, text_stream=lambda _: None)
    sequence = begun(emission, GenerateParams(max_new_tokens=4))
    with pytest.raises(SpecbuildError, match="output token 1 are not numbers"):
        emission.append(NewTokens(sequence, [(7, math.nan)]))


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (GenerateParams(), False),
        (GenerateParams(logprobs=True), True),
        (GenerateParams(sampling=SamplingParams(temperature=1.0, top_k=3)), True),
    ],
)
def test_which_requests_need_logits(params: GenerateParams, needed: bool) -> None:
    assert params.needs_full_logits == needed


def accepted_of(events: list[Event]) -> list[bool]:
    return [event.from_draft for event in events if isinstance(event, TokenEvent)]


def test_replayed_tokens_give_no_events_and_count_as_no_accepted_drafts() -> None:
    """A step may replay its first accepted drafts and emit the others."""
    emission = Emission((), max_depth=4, text_stream=lambda _: None)
    request = Request(id="a", prompt_ids=(5, 6), params=GenerateParams(), token_budget=8)
    first = emission.admit(0, request, {})
    emission.append(NewTokens(first, [(7, -0.5)]))
    emission.append(NewTokens(first, [(8, -0.5), (9, -0.5)], accepted=1, proposed=2))
    again = emission.restore(first, {})
    assert emission.append(NewTokens(again, [(7, -0.5)])) == []
    tokens = [(token, -0.5) for token in (8, 9, 10, 11, 12)]
    events = emission.append(NewTokens(again, tokens, accepted=3, proposed=4))
    assert [event.token_id for event in events if isinstance(event, TokenEvent)] == [10, 11, 12]
    assert accepted_of(events) == [True, False, False]
    assert again.counters.stats(2).acceptance_histogram == (0, 2, 0, 0, 0)


def test_only_the_first_token_reports_cached_prompt_tokens() -> None:
    emission = Emission((), max_depth=4, text_stream=lambda _: None)
    sequence = begun(emission, GenerateParams(max_new_tokens=4))
    sequence.counters.cached_tokens = 2
    events = [
        *emission.append(NewTokens(sequence, [(7, -0.5), (8, -0.5)])),
        *emission.append(NewTokens(sequence, [(9, -0.5)])),
    ]
    assert [e.cached_tokens for e in events if isinstance(e, TokenEvent)] == [2, 0, 0]
