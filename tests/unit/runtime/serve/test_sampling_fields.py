"""Fields of sampling and log-probabilities over HTTP: the engine's tokens, in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serve.served import LETTERS, NAME, TEMPLATE, served, toy_codec, worded
from test_logit_changes import decode_by_definition
from toy_device import toy_cuda
from toy_model import EOS, VOCAB, target_logits
from toy_plan import SHAPES

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "bcd"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(worded(TEMPLATE)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + path, json={"model": NAME} | fields, timeout=300)


FIELDS: list[dict[str, Any]] = [
    {"min_p": 0.3},
    {"logit_bias": {"5": 4.5, "9": -100}},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.3, "temperature": 0},
    {"logit_bias": {str(EOS): 100}, "min_tokens": 4},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_fields_have_the_effect_of_the_engines_parameters(url: str, fields: dict[str, Any]) -> None:
    assert_means(url, fields)


def test_fields_have_the_same_effect_on_a_device() -> None:
    """Send all fields at once, and between them a request without any."""
    engine = toy_cuda(text=toy_codec()).engine
    drafts = DraftSetting(SHAPES[1])
    with served(engine, setting=drafts) as (url, _), ThreadPoolExecutor() as clients:
        list(clients.map(lambda fields: assert_means(url, fields), [*FIELDS, {}]))


def assert_means(url: str, fields: dict[str, Any]) -> None:
    sampling_fields = {"temperature": 0.9, "seed": 5} | fields
    answer = post(
        url, COMPLETIONS, prompt="bcd", max_tokens=8, return_token_ids=True, **sampling_fields
    )
    least = sampling_fields.pop("min_tokens", 0)
    bias = {int(token): value for token, value in sampling_fields.pop("logit_bias", {}).items()}
    sampling = SamplingParams(**sampling_fields, logit_bias=bias)
    params = GenerateParams(max_new_tokens=8, sampling=sampling, min_tokens=least)
    ids = answer.json()["choices"][0]["token_ids"]
    assert ids == decode_by_definition([1, 2, 3], params)
    assert len(ids) > least


def test_a_completion_has_the_likeliest_tokens(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": "bcd", "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**body, logprobs=5).choices[0].logprobs
    assert whole is not None and whole.tokens and whole.token_logprobs and whole.top_logprobs
    tokens = [1, 2, 3]
    for text, logprob, best in zip(
        whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True
    ):
        logits = target_logits(tokens)
        lse = math.log(sum(math.exp(float(x)) for x in logits))
        order = sorted(range(VOCAB), key=lambda i: (-float(logits[i]), i))[:5]
        by_letter = {LETTERS[i]: float(logits[i]) - lse for i in order if i < len(LETTERS)}
        assert best[text] == logprob
        assert {t: p for t, p in best.items() if t in by_letter} == pytest.approx(by_letter)
        assert 1 <= len(best) <= 6
        if text not in LETTERS:
            break
        tokens.append(LETTERS.index(text))
    assert whole.text_offset == [sum(map(len, whole.tokens[:i])) for i in range(len(whole.tokens))]
    chunks = [c for c in client.completions.create(**body, logprobs=5, stream=True) if c.choices]
    joined = [best for c in chunks for best in c.choices[0].logprobs.top_logprobs]  # type: ignore[union-attr]
    assert joined == whole.top_logprobs
    chosen = client.completions.create(**body, logprobs=0).choices[0].logprobs
    assert chosen is not None and chosen.token_logprobs == whole.token_logprobs
    pairs = zip(whole.tokens, whole.token_logprobs, strict=True)
    assert chosen.top_logprobs == [{text: logprob} for text, logprob in pairs]


def test_a_chat_has_the_likeliest_tokens(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3}
    by_token = client.chat.completions.create(**body).choices[0].logprobs
    assert by_token is not None and by_token.content and by_token.refusal is None
    for token in by_token.content:
        assert len(token.top_logprobs) == 3
        # Greedy sampling selects the first.
        assert token.top_logprobs[0].logprob == token.logprob
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.top_logprobs[0].bytes or []).decode() == token.token
        assert sorted((t.logprob for t in token.top_logprobs), reverse=True) == [
            t.logprob for t in token.top_logprobs
        ]
    chunks = client.chat.completions.create(**body, stream=True)
    parts = [c.choices[0].logprobs for c in chunks if c.choices]
    assert [t for part in parts if part for t in part.content or []] == by_token.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_has_the_log_probabilities_of_its_text(
    client: openai.OpenAI, streamed: bool
) -> None:
    body: dict[str, Any] = {"model": NAME, "input": "bcd", "max_output_tokens": 8}
    body |= {"temperature": 0, "include": ["message.output_text.logprobs"]}
    answer = client.responses.create(**body, top_logprobs=2)
    assert answer.top_logprobs == 2
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert "".join(token.token for token in part.logprobs) == part.text == answer.output_text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    plain = client.responses.create(**(body | {"include": []}))
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr]
    if streamed:
        events = list(client.responses.create(**body, top_logprobs=2, stream=True))
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert all("".join(t.token for t in e.logprobs) == e.delta for e in deltas)
        (done,) = [e for e in events if e.type == "response.output_text.done"]
        assert [t.logprob for t in done.logprobs] == [t.logprob for t in part.logprobs]


def test_log_probabilities_of_harmony_cover_the_answer_only() -> None:
    """The toy model does not write harmony by itself: logit biases force a message."""
    with served(worded(TEMPLATE), parser="harmony") as (url, app):
        codec = app.serving.codec
        marks = [codec.token_id(f"<|{name}|>") for name in ("channel", "message")]
        bias = {str(token): 9 for token in marks if token is not None}
        body = {"input": "bcd", "max_output_tokens": 24, "temperature": 0, "logit_bias": bias}
        body |= {"include": ["message.output_text.logprobs"], "frequency_penalty": 2}
        answer = post(url, "/v1/responses", **body).json()
    for item in answer["output"]:
        for part in item["content"] if item["type"] == "message" else ():
            assert {len(token["token"]) for token in part["logprobs"]} <= {1}
            assert part["text"].endswith("".join(token["token"] for token in part["logprobs"]))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"min_p": 1.5}, "min_p"),
    (COMPLETIONS, {"min_p": "much"}, "min_p"),
    (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": -2.1}, "frequency_penalty"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"29": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    ("/v1/responses", {"top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
def test_the_error_names_an_invalid_value(
    url: str, path: str, fields: dict[str, Any], named: str
) -> None:
    prompts = {COMPLETIONS: {"prompt": "b"}, CHAT: {"messages": HELLO}}
    answer = post(url, path, **prompts.get(path, {"input": "b"}), **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named in error["message"]
    assert (error["param"] or "").split(".")[0] == named


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (COMPLETIONS, {"min_p": 0.1}, "min_p"),
        (COMPLETIONS, {"logit_bias": {"1": 1}}, "logit_bias"),
        (COMPLETIONS, {"logprobs": 1}, "top_logprobs"),
    ],
)
def test_an_older_gpu_engine_names_the_unsupported_field(
    path: str, fields: dict[str, Any], named: str
) -> None:
    with served(toy_cuda(adjusted_steps=False).engine) as (url, _):
        answer = post(url, path, prompt=[1], **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named
