"""Batches of chats, descriptions of the server, and resetting its prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import openai
import pytest
from serve.served import NAME, TEMPLATE, served, worded
from toy_engine import CACHING

from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.routes import OPERATIONS

CHATS = [[{"role": "user", "content": text}] for text in ("bcd", "efg", "hij")]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, App]]:
    with (
        served(worded(TEMPLATE, settings=CACHING), parser="harmony", keys=("k",)) as (url, app),
        httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=300) as client,
    ):
        yield client, app


def test_a_batch_has_the_answers_of_single_chats(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 9, "temperature": 0}
    path = "/v1/chat/completions"
    single = [client.post(path, json=fields | {"messages": c}).json() for c in CHATS]
    batch = client.post(f"{path}/batch", json=fields | {"messages": CHATS}).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    for choice, answer in zip(batch["choices"], single, strict=True):
        assert choice["message"] == answer["choices"][0]["message"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(answer["usage"][name] for answer in single)


@pytest.mark.parametrize(
    ("field", "value"), [("stream", True), ("n", 2), ("messages", []), ("messages", [[]])]
)
def test_rejects_streamed_and_empty_batches(
    server: tuple[httpx.Client, App], field: str, value: Any
) -> None:
    body = {"model": NAME, "messages": CHATS} | {field: value}
    answer = server[0].post("/v1/chat/completions/batch", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_the_server_describes_itself(server: tuple[httpx.Client, App]) -> None:
    client, app = server
    info = client.get("/server_info").json()
    limits = app.service.engine.manifest.limits
    assert info["max_model_len"] == limits.max_seq_len
    assert info["max_num_seqs"] == limits.max_batch_size
    assert info["models"][0] == NAME and info["prefix_caching"] is True
    assert client.get("/tokenizer_info").json()["chat_template"] == TEMPLATE
    for path in ("/server_info", "/tokenizer_info"):
        assert httpx.get(f"{client.base_url}{path}").status_code == 401


def test_the_api_page_loads_no_other_file(server: tuple[httpx.Client, App]) -> None:
    page = httpx.get(f"{server[0].base_url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loaded.extend(v or "" for k, v in attrs if k in ("src", "href") or tag == "script")

    Links().feed(page.text)
    assert loaded == ["openapi.json"]
    for operation in OPERATIONS:
        assert not operation.summary or operation.path.replace(":path", "") in page.text


def test_a_reset_empties_the_prefix_cache(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    body = {"model": NAME, "prompt": "bcdefghij" * 4, "max_tokens": 1}

    def cached() -> int:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert client.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
    assert cached() > 0


def test_liveness_does_not_depend_on_readiness(server: tuple[httpx.Client, App]) -> None:
    client, app = server
    url = str(client.base_url)
    assert httpx.get(f"{url}/livez").status_code == httpx.get(f"{url}/readyz").status_code == 200
    app.service.record_failure(ValueError("broken"))
    assert httpx.get(f"{url}/livez").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 503
    body = {"model": NAME, "prompt": "b", "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 200


def test_lists_the_input_of_a_response(server: tuple[httpx.Client, App]) -> None:
    http, _ = server
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="k", max_retries=0)
    first = client.responses.create(model=NAME, input="bcd", max_output_tokens=3)
    (item,) = client.responses.input_items.list(first.id).data
    assert (item.type, item.role) == ("message", "user")  # type: ignore[union-attr]
    assert item.content[0].text == "bcd"  # type: ignore[union-attr, index]
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "efg"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "hij"},
    ]
    second = client.responses.create(
        model=NAME, input=turns, previous_response_id=first.id, max_output_tokens=3
    )
    items = client.responses.input_items.list(second.id).data
    assert [i.type for i in items] == ["message", "function_call", "function_call_output"]
    assert len({i.id for i in items}) == 3
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")
