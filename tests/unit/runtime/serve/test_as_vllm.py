"""Answers in the format of vLLM's own tests: counts, token names, last chunks, roles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve.served import LETTERS, NAME, TEMPLATE, served, worded

TEXT = "bcdefghij"
HELLO = [{"role": "user", "content": "bcd"}]
FIELDS = {"model": NAME, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
# Text tokens only, so that every token has some text.
LETTERS_ONLY = {"allowed_token_ids": list(range(len(LETTERS)))}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(worded(TEMPLATE)) as (url, _):
        yield url


def chunks(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, without [DONE]."""
    body = FIELDS | LETTERS_ONLY | {"stream": True} | fields
    answer = httpx.post(url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_0_returns_the_sampled_tokens_only(url: str, stream: bool) -> None:
    body = FIELDS | {"prompt": TEXT, "echo": True, "stream": stream, "logprobs": 0}
    if stream:
        parts = [c["choices"][0]["logprobs"] for c in chunks(url, "/v1/completions", **body)]
    else:
        parts = [httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]]
    tops = [top for part in parts for top in part["top_logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert len(tops) == len(TEXT) + FIELDS["max_tokens"]
    assert tops[0] is values[0] is None
    assert tops[1:] == [{t: v} for t, v in zip(tokens[1:], values[1:], strict=True)]


def test_the_last_chunk_of_a_chat_has_its_last_text(url: str) -> None:
    streamed = chunks(
        url, "/v1/chat/completions", messages=HELLO, logprobs=True, return_token_ids=True
    )
    choices = [chunk["choices"][0] for chunk in streamed]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"]["content"] for choice in choices[1:])
    assert all(len(choice["logprobs"]["content"]) == 1 for choice in choices[1:])
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) == 1 + FIELDS["max_tokens"]
    # The prompt is a field of the chunk, not of a choice.
    prompts = [chunk.get("prompt_token_ids") for chunk in streamed]
    assert prompts[0] and not any(prompts[1:])


def test_requests_need_no_model(url: str) -> None:
    for path, prompt in (
        ("completions", {"prompt": TEXT}),
        ("chat/completions", {"messages": HELLO}),
        ("responses", {"input": "bcd"}),
    ):
        answer = httpx.post(f"{url}/v1/{path}", json=prompt)
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)


def test_completions_have_the_fields_of_token_ids(url: str) -> None:
    (choice,) = httpx.post(f"{url}/v1/completions", json=FIELDS | {"prompt": TEXT}).json()[
        "choices"
    ]
    assert choice["token_ids"] is choice["prompt_token_ids"] is None


def test_token_strings_equal_the_vocabulary(url: str) -> None:
    plain = httpx.post(f"{url}/tokenize", json={"prompt": TEXT}).json()
    assert plain["token_strs"] is None
    spelled = httpx.post(f"{url}/tokenize", json={"prompt": TEXT, "return_token_strs": True})
    assert spelled.json() == plain | {"token_strs": list(TEXT)}


def test_the_template_receives_every_role(url: str) -> None:
    def ask(content: Any) -> dict[str, Any]:
        body = FIELDS | {"messages": [{"role": "my-role", "content": content}]}
        answer: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        return dict(answer["choices"][0]["message"])

    assert ask("bcd") == ask([{"type": "text", "text": "bcd"}])
    body = FIELDS | {"messages": [{"role": 1, "content": "bcd"}]}
    error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages.0.role"


def test_server_options_for_usage_in_streams_and_token_ids() -> None:
    with served(worded(TEMPLATE), forces_usage=True, tokens_as_ids=True) as (url, _):
        for path, prompt in (
            ("/v1/completions", {"prompt": TEXT}),
            ("/v1/chat/completions", {"messages": HELLO}),
        ):
            counts = [c["usage"]["completion_tokens"] for c in chunks(url, path, **prompt)]
            assert counts == sorted(counts)
            assert counts[-1] == FIELDS["max_tokens"]
            options = {"stream_options": {"include_usage": False}}
            counted = [bool(c.get("usage")) for c in chunks(url, path, **prompt, **options)]
            assert counted == [False] * (len(counted) - 1) + [True]
        answer = httpx.post(f"{url}/v1/completions", json=FIELDS | {"prompt": TEXT, "logprobs": 1})
        names = answer.json()["choices"][0]["logprobs"]["tokens"]
        assert all(name.startswith("token_id:") for name in names)
