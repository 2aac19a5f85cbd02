"""Log-probabilities that steps do not compute are None; logits that are no numbers are damage."""

from __future__ import annotations

import math

import pytest

from specbuild.runtime.decode.emission import Emission
from specbuild.runtime.decode.stepper import NewTokens
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import GenerateParams, Request, SequenceState, TokenEvent
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
def test_who_asks_for_logits(params: GenerateParams, needed: bool) -> None:
    assert params.needs_full_logits == needed
