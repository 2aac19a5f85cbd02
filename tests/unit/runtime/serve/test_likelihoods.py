"""Log-probabilities of prompts, on CPU and device engines, by the toy model's definition."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serve.served import LETTERS, NAME, TEMPLATE, served, toy_codec, worded
from toy_device import toy_cuda
from toy_model import VOCAB, target_logits
from toy_plan import SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.serve.service import ServiceOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "bcdbcjhgbcdaebf"
IDS = [LETTERS.index(letter) for letter in TEXT]
HELLO = [{"role": "user", "content": "bcd"}]


@pytest.fixture(scope="module", params=["host", "device"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    engine, setting = worded(TEMPLATE), None
    if request.param == "device":
        engine, setting = toy_cuda(text=toy_codec(TEMPLATE)).engine, DraftSetting(SHAPES[1])
    with served(engine, parser="harmony", setting=setting) as (url, _):
        yield url


def answer_of(url: str, path: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return an answer; the chunks of a stream are joined."""
    answer = httpx.post(url + path, json={"model": NAME, "stream": stream} | fields, timeout=300)
    assert answer.status_code == 200, answer.text
    if not stream:
        whole: dict[str, Any] = answer.json()
        return whole
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: {" in line]
    chunks = [json.loads(line) for line in lines]
    joined = chunks[0]
    for chunk in chunks[1:]:
        for choice in chunk["choices"]:
            joined_choices = [c for c in joined["choices"] if c["index"] == choice["index"]]
            if not joined_choices:
                joined["choices"].append(choice)
                continue
            (mine,) = joined_choices
            mine["finish_reason"] = choice["finish_reason"]
            if "text" in mine:
                mine["text"] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    mine["logprobs"][name] += values
    return dict(joined)


def row(ids: list[int]) -> list[float]:
    """Return the log-probabilities of the token after ``ids``."""
    logits = [float(x) for x in target_logits(ids)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def assert_scores(scores: list[dict[str, Any] | None], ids: list[int], count: int) -> None:
    """Assert that all tokens but the first have their own log-probability and the top ones."""
    assert len(scores) == len(ids)
    assert scores[0] is None
    for i, score in enumerate(scores[1:], 1):
        assert score is not None
        expected = row(ids[:i])
        order = sorted(range(VOCAB), key=lambda t: (-expected[t], t))
        assert set(score) == {str(t) for t in {ids[i], *order[:count]}}
        for token, entry in score.items():
            assert entry["logprob"] == pytest.approx(expected[int(token)], abs=1e-5)
            assert entry["rank"] == order.index(int(token)) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("count", [0, 4])
def test_a_completion_has_the_log_probabilities_of_its_prompts(
    url: str, stream: bool, max_tokens: int, count: int
) -> None:
    fields = {"prompt": [TEXT, TEXT[:5]], "max_tokens": max_tokens, "n": 2, "ignore_eos": True}
    answer = answer_of(url, COMPLETIONS, stream=stream, **fields, prompt_logprobs=count)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        ids = IDS if choice["index"] < 2 else IDS[:5]
        assert_scores(choice["prompt_logprobs"], ids, count)
        assert choice["finish_reason"] == "length"
        assert choice["text"] == "" or max_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_has_the_log_probabilities_of_all_tokens(
    url: str, stream: bool, max_tokens: int
) -> None:
    letters = {str(i): -100 for i in range(len(LETTERS), VOCAB)}
    answer = answer_of(
        url, COMPLETIONS, stream=stream, prompt=TEXT, max_tokens=max_tokens, echo=True,
        logprobs=2, temperature=0, logit_bias=letters,
    )  # fmt: skip
    (choice,) = answer["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(TEXT)
    assert len(text) == len(TEXT) + max_tokens
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    ids = [LETTERS.index(letter) for letter in text]
    for i in range(1, len(ids)):
        expected = row(ids[:i])
        assert logprobs["token_logprobs"][i] == pytest.approx(expected[ids[i]], abs=1e-5)
        best = logprobs["top_logprobs"][i]
        assert best[text[i]] == logprobs["token_logprobs"][i]
        by_letter = {LETTERS[t]: expected[t] for t in range(len(LETTERS)) if LETTERS[t] in best}
        assert by_letter == pytest.approx(
            {t: p for t, p in best.items() if t in by_letter}, abs=1e-5
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_chat_has_the_log_probabilities_of_its_prompt(
    url: str, stream: bool, max_tokens: int
) -> None:
    body = {"messages": HELLO, "max_tokens": max_tokens, "return_token_ids": True}
    answer = answer_of(url, CHAT, stream=stream, **body, prompt_logprobs=2)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert_scores(answer["prompt_logprobs"], ids, 2)
    if not stream and not max_tokens:
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0]["finish_reason"] == "length"


def test_tokens_may_be_named_by_their_ids(url: str) -> None:
    fields = {"max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = answer_of(url, COMPLETIONS, stream=False, prompt=TEXT, echo=True, logprobs=1, **fields)
    (choice,) = answer["choices"]
    ids = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    assert ids == [*IDS, *choice["token_ids"]]
    assert all(key.startswith("token_id:") for key in choice["logprobs"]["top_logprobs"][-1])
    chat = answer_of(url, CHAT, stream=False, messages=HELLO, logprobs=True, **fields)
    (choice,) = chat["choices"]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]


def test_scoring_and_generation_share_the_engine(url: str) -> None:
    body = {"model": NAME, "prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    plain = httpx.post(url + COMPLETIONS, json=body).json()["choices"][0]["text"]

    def ask(scored: bool) -> dict[str, Any]:
        fields = body | ({"prompt_logprobs": 1} if scored else {})
        choice: dict[str, Any] = httpx.post(url + COMPLETIONS, json=fields, timeout=300).json()
        return dict(choice["choices"][0])

    with ThreadPoolExecutor(8) as clients:
        for i, choice in enumerate(clients.map(ask, [i % 2 == 0 for i in range(16)])):
            assert choice["text"] == plain
            assert (choice["prompt_logprobs"] is None) == bool(i % 2)


@pytest.mark.parametrize("count", [-1, 21])
def test_rejects_too_many_top_logprobs(url: str, count: int) -> None:
    body = {"model": NAME, "prompt": TEXT, "prompt_logprobs": count}
    error = httpx.post(url + COMPLETIONS, json=body)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "prompt_logprobs"


def test_the_server_option_limits_top_logprobs() -> None:
    with served(worded(), max_logprobs=3) as (url, app):
        assert app.service.options.max_logprobs == 3 < ServiceOptions(names=("a",)).max_logprobs
        body = {"model": NAME, "prompt": TEXT, "max_tokens": 1}
        assert httpx.post(url + COMPLETIONS, json=body | {"logprobs": 3}).status_code == 200
        error = httpx.post(url + COMPLETIONS, json=body | {"logprobs": 4})
        assert error.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_chat_begins_with_its_last_message(url: str, stream: bool) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "cde"}]
    body = {"messages": messages, "max_tokens": 2, "stream": stream, "model": NAME, "echo": True}
    answer = httpx.post(url + CHAT, json=body, timeout=300).text
    key, first = ("delta", answer.splitlines()[0]) if stream else ("message", answer)
    content = json.loads(first.removeprefix("data: "))["choices"][0][key]["content"]
    assert content.startswith("cde")


def test_disconnecting_cancels_scoring() -> None:
    """The next request does not wait for the remaining scorings of a disconnected client."""
    with served(worded()) as (url, app):
        body = {"model": NAME, "prompt": [TEXT] * 60, "max_tokens": 0, "prompt_logprobs": 0}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + COMPLETIONS, json=body, timeout=0.001)
        after = httpx.post(
            url + COMPLETIONS, json={"model": NAME, "prompt": "bcd", "max_tokens": 1}, timeout=60
        )
        assert after.status_code == 200
        assert app.service.open_requests == 0
