"""The answers of each route: the format of OpenAI's clients, the tokens of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve.served import LETTERS, NAME, TEMPLATE, served, worded
from toy_model import decode_plainly

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.serve.app import App
from specbuild.runtime.text.stream import TextStream

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, App]]:
    with served(worded(TEMPLATE)) as (url, app), httpx.Client(base_url=url, timeout=300) as client:
        yield client, app


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids if i < len(LETTERS))


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": NAME, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    completion: dict[str, Any] = answer.json()
    return completion


def streamed(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": NAME, "temperature": 0, "stream": True} | fields
    with client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_has_the_tokens_of_the_engine(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    plain = decode_plainly([1, 2, 3], 12, GREEDY)
    answer = complete(client, prompt="bcd", max_tokens=12)
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    choice = answer["choices"][0]
    assert choice["text"] == text_of(plain)
    assert choice["finish_reason"] == ("length" if len(plain) == 12 else "stop")
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == len(plain)


def test_prompts_may_be_ids_and_lists(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    single = complete(client, prompt=[1, 2, 3], max_tokens=6)["choices"][0]["text"]
    for many in (["bcd", "e"], [[1, 2, 3], [4]]):
        answer = complete(client, prompt=many, max_tokens=6, n=2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"][:2]] == [single, single]
        assert answer["usage"]["prompt_tokens"] == 4


def test_choices_have_different_seeds(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    fields = {"prompt": "b", "max_tokens": 16, "temperature": 1.0, "seed": 7, "n": 4}
    texts = [choice["text"] for choice in complete(client, **fields)["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in complete(client, **fields)["choices"]]
    alone = complete(client, **(fields | {"n": 1}))["choices"][0]["text"]
    assert alone == texts[0]
    seeds = [(7 + i * 0x9E3779B1) % 2**31 for i in range(4)]
    plain = [decode_plainly([1], 16, SamplingParams(temperature=1.0, seed=s)) for s in seeds]
    assert texts == [text_of(ids) for ids in plain]


def test_without_a_seed_answers_differ(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    fields = {"prompt": "b", "max_tokens": 24, "temperature": 1.0}
    texts = {complete(client, **fields)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


def test_a_stream_has_the_text_of_the_answer(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    whole = complete(client, prompt="bcd", max_tokens=20, logprobs=0, return_token_ids=True)
    chunks = streamed(
        client,
        "/v1/completions",
        prompt="bcd",
        max_tokens=20,
        logprobs=0,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    choice = whole["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for piece in pieces for value in piece["logprobs"][name]]
        assert joined == choice["logprobs"][name]
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_stop_strings_and_stop_tokens_end_an_output(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    whole = complete(client, prompt="bcd", max_tokens=20, return_token_ids=True)["choices"][0]
    letter = whole["text"][4]
    stopped = complete(client, prompt="bcd", max_tokens=20, stop=[letter, "nowhere"])
    assert stopped["choices"][0]["text"] == whole["text"][: whole["text"].index(letter)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    token = whole["token_ids"][3]
    ended = complete(client, prompt="bcd", stop_token_ids=[token], return_token_ids=True)
    ids = ended["choices"][0]["token_ids"]
    assert ids == whole["token_ids"][: whole["token_ids"].index(token) + 1]


def test_echo_begins_with_the_prompt(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    plain = complete(client, prompt="bcd", max_tokens=5)["choices"][0]["text"]
    assert complete(client, prompt="bcd", max_tokens=5, echo=True)["choices"][0]["text"] == (
        "bcd" + plain
    )


def test_a_chat_uses_the_template(server: tuple[httpx.Client, App]) -> None:
    client, app = server
    messages = [{"role": "user", "content": "bcd"}]
    codec = app.serving.codec
    ids = codec.encode_chat(messages, most_tokens=64)
    assert ids == (1, 2, 3, codec.token_id("<|start|>"))
    body = {"model": NAME, "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == text_of(decode_plainly(list(ids), 9, GREEDY))
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "bcd"}]}]
    again = client.post("/v1/chat/completions", json=body).json()
    assert again["choices"][0]["message"] == message
    chunks = streamed(
        client,
        "/v1/chat/completions",
        messages=messages,
        max_tokens=9,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks.pop()["choices"] == []
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == message["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(part["content"]) for part in parts) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_mark_accepted_draft_tokens(path: str) -> None:
    fields = {"prompt": "bb", "messages": [{"role": "user", "content": "bb"}], "max_tokens": 40}
    setting, counting = DraftSetting(DraftShape(3, 4, 12)), {"include_usage": True}
    with (
        served(worded(TEMPLATE), setting=setting) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        plain = streamed(client, path, **fields)
        marked = streamed(client, path, **fields, return_draft_tokens=True, stream_options=counting)
        refused = client.post(path, json=fields | {"model": NAME, "return_draft_tokens": True})
        accepted = counted(client, "vllm:spec_decode_num_accepted_tokens_total")
    used = marked.pop()["usage"]["completion_tokens"]
    choices = [chunk["choices"][0] for chunk in marked]
    assert joined_text(choices) == joined_text([chunk["choices"][0] for chunk in plain])
    parts = [choice for choice in choices if "from_draft" in choice]
    assert len(parts) >= len(choices) - 1  # the first chunk of a chat has no tokens
    assert sum(part["token_count"] for part in parts) == used
    drafted = sum(part["token_count"] for part in parts if part["from_draft"])
    assert 0 < drafted == accepted / 2
    assert not any("from_draft" in chunk["choices"][0] for chunk in plain)
    assert refused.status_code == 400 and "requires stream" in refused.json()["error"]["message"]


def joined_text(choices: list[dict[str, Any]]) -> str:
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize(
    ("path", "body", "streams"),
    [
        ("/v1/completions", {"prompt": "b"}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "b"}]}, 0),
        ("/v1/responses", {"input": "b"}, 0),
    ],
)
def test_an_output_is_decoded_once(path: str, body: dict[str, Any], streams: int) -> None:
    """The engine decodes the text of a completion; the parser decodes that of a chat."""
    engine = worded(TEMPLATE)
    assert engine.text is not None
    calls, stream = [], engine.text.stream

    def counted(*arguments: Any, **options: Any) -> TextStream:
        calls.append(arguments)
        return stream(*arguments, **options)

    engine.text.stream = counted  # type: ignore[method-assign]
    with served(engine) as (url, _):
        answer = httpx.post(url + path, json={"model": NAME, **body}, timeout=300)
    assert answer.status_code == 200 and len(calls) == streams


def test_models_tokens_health_and_metrics(server: tuple[httpx.Client, App]) -> None:
    client, app = server
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert names == [NAME, "other-name"]
    assert client.get(f"/v1/models/{NAME}").json()["max_model_len"] == 64
    assert client.get("/v1/models/nobody").status_code == 404
    tokens = client.post("/tokenize", json={"prompt": "abc"}).json()
    assert tokens.pop("token_strs") is None
    assert tokens == {"tokens": [0, 1, 2], "count": 3, "max_model_len": 64}
    assert client.post("/detokenize", json={"tokens": [2, 1, 0]}).json() == {"prompt": "cba"}
    assert client.get("/health").status_code == client.get("/ping").status_code == 200
    assert client.get("/load").json() == {
        "server_load": 0,
        "running": 0,
        "waiting": 0,
        "used_pages": 0.0,
    }
    assert "version" in client.get("/version").json()
    before = counted(client, "vllm:generation_tokens_total")
    used = complete(client, prompt="bcd", max_tokens=7)["usage"]
    assert counted(client, "vllm:generation_tokens_total") == before + used["completion_tokens"]
    assert counted(client, "vllm:num_requests_running") == 0
    assert app.service.open_requests == 0


def counted(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
