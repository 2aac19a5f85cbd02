"""Requests and answers of Dynamo's front end, without Dynamo."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.cli.dynamo.requests import chunk_of, params_of
from specbuild.runtime.errors import RequestError
from specbuild.runtime.records import RunRecord, RunStats
from specbuild.runtime.request import FinishEvent, TokenEvent


def request(**groups: Any) -> dict[str, Any]:
    """Return a request of the front end, in which groups without values are null."""
    absent = dict.fromkeys(("sampling_options", "stop_conditions", "output_options"))
    return {"token_ids": [1, 2], "model": "m", **absent, **groups}


def test_fields_are_converted_to_parameters() -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 2**31 + 7,
        "presence_penalty": 0.5, "frequency_penalty": None, "repetition_penalty": 1.25, "n": 1,
    }  # fmt: skip
    stopping = {
        "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": ["x"],
        "stop_token_ids_hidden": [5], "stop_token_ids": [6],
    }  # fmt: skip
    params = params_of(
        request(
            sampling_options=sampling, stop_conditions=stopping, output_options={"logprobs": 3}
        ),
        longest=100,
    )
    chosen = params.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.5, 0.9, 0, 0.1)
    assert (chosen.seed, chosen.presence_penalty, chosen.repetition_penalty) == (
        2**31 + 7,
        0.5,
        1.25,
    )
    assert chosen.frequency_penalty == 0
    assert (params.max_new_tokens, params.min_tokens, params.ignore_eos) == (9, 2, True)
    assert (params.stop_token_ids, params.top_logprobs) == ((6, 5), 3)
    # The front end generates the text and applies stop strings.
    assert params.raw and not params.detokenize and params.stop == ()


def test_omitted_fields_have_the_defaults_of_openai() -> None:
    params = params_of(request(), longest=77)
    assert (params.max_new_tokens, params.sampling.temperature) == (77, 1.0)
    seeds = {params_of(request(), longest=1).sampling.seed for _ in range(8)}
    assert len(seeds) > 1
    greedy = params_of(request(sampling_options={"temperature": 0}), longest=0)
    assert (greedy.sampling.temperature, greedy.max_new_tokens) == (0, 1)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 2}, "n must be 1"),
        ({"guided_decoding": {"json": {}}}, "structured output is not supported"),
        ({"top_p": 7.0}, "top_p"),
        ([1], "must be an object"),
    ],
)
def test_rejects_unsupported_fields(sampling: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        params_of(request(sampling_options=sampling), longest=10)


def test_each_step_is_a_chunk_and_the_last_has_the_finish_reason() -> None:
    token = TokenEvent(0, 8, "", from_draft=False, logprob=-0.5, top_logprobs=((8, -0.5), (9, -2)))
    chunk = chunk_of([token, token], prompt_tokens=3, logprobs=False)
    assert chunk == {"token_ids": [8, 8], "index": 0}
    with_logprobs = chunk_of([token], prompt_tokens=3, logprobs=True)
    assert with_logprobs["log_probs"] == [-0.5]
    (alternatives,) = with_logprobs["top_logprobs"]
    assert [(a["rank"], a["token_id"], a["logprob"]) for a in alternatives] == [
        (1, 8, -0.5),
        (2, 9, -2),
    ]
    for reason, finish_reason in (("eos", "stop"), ("length", "length"), ("abort", "cancelled")):
        stats = RunStats(3, 5, 4, 1.0, (4,), (), 0.1, 0.1, 9.0)
        record = RunRecord("r", (1, 2, 3), (8,) * 5, None, reason, stats)  # type: ignore[arg-type]
        chunk = chunk_of([token, FinishEvent(0, record)], prompt_tokens=3, logprobs=False)
        assert (chunk["finish_reason"], chunk["token_ids"]) == (finish_reason, [8])
        assert chunk["completion_usage"] == {
            "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8,
        }  # fmt: skip
