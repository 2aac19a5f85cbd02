"""Stored responses of ``/v1/responses`` are bounded, and deleted ones are cancelled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.served import NAME, TEMPLATE, served, worded
from serve.test_bad_input import wait_until

from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.responses.store import MAX_RESPONSE_BYTES, ResponseStore

RESPONSES = "/v1/responses"
SHORT = {"model": NAME, "input": "b", "max_output_tokens": 1}
LONG = SHORT | {"max_output_tokens": 4000, "ignore_eos": True, "background": True}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, App]]:
    engine = worded(TEMPLATE, max_seq_len=4096)
    with served(engine) as (url, app), httpx.Client(base_url=url, timeout=300) as client:
        yield client, app


def put(store: ResponseStore, name: str, size: int) -> bool:
    return store.put({"id": name, "background": False}, [{"content": "x" * size}])


@given(st.lists(st.integers(0, 400), max_size=30))
def test_a_store_has_the_newest_responses_within_its_limits(sizes: list[int]) -> None:
    store = ResponseStore(max_responses=4, max_response_bytes=300, max_bytes=700)
    accepted = [str(i) for i, size in enumerate(sizes) if put(store, str(i), size)]
    held = {}
    for name in accepted:
        try:
            held[name] = store.get(name).size
        except ApiError as error:
            assert error.status == 404
    assert list(held) == accepted[len(accepted) - len(held) :]
    assert len(held) <= 4 and sum(held.values()) == store.stored_bytes <= 700
    assert all(size <= 300 for size in held.values())
    assert not accepted or accepted[-1] in held
    for name in held:
        store.delete(name)
    assert store.stored_bytes == 0


def test_responses_expire() -> None:
    store = ResponseStore(max_age_s=0.0)
    put(store, "a", 1)
    time.sleep(0.002)
    with pytest.raises(ApiError, match="no response 'a'"):
        store.get("a")
    assert store.stored_bytes == 0


@pytest.mark.parametrize(
    "metadata",
    [
        {str(i): "v" for i in range(17)},
        {"k" * 65: "v"},
        {"k": "v" * 513},
        {"k": 1},
        {"k": {"nested": "v"}},
        ["k"],
        {"k" * (1 << 20): "v"},
    ],
)
def test_metadata_has_the_limits_of_openai(server: tuple[httpx.Client, App], metadata: Any) -> None:
    answer = server[0].post(RESPONSES, json=SHORT | {"metadata": metadata})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("metadata")
    # A long key of the client is truncated in the error.
    assert len(answer.content) < 3000


def test_metadata_within_the_limits_is_returned(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    metadata = {f"{i:064}": "v" * 512 for i in range(16)}
    answer = client.post(RESPONSES, json=SHORT | {"metadata": metadata})
    assert answer.status_code == 200, answer.text
    assert client.get(f"{RESPONSES}/{answer.json()['id']}").json()["metadata"] == metadata


def test_unknown_fields_of_a_text_format_are_not_stored(server: tuple[httpx.Client, App]) -> None:
    client, _ = server
    text = {"format": {"type": "text", "other": "x" * 10_000}, "another": "x"}
    answer = client.post(RESPONSES, json=SHORT | {"text": text}).json()
    assert answer["text"] == {"format": {"type": "text"}}
    assert client.get(f"{RESPONSES}/{answer['id']}").json() == answer


def test_rejects_a_request_that_is_too_large_to_store(server: tuple[httpx.Client, App]) -> None:
    """Its text is short, but fields that the template ignores would be stored too."""
    client, app = server
    part = {"type": "input_text", "text": "b", "other": "x" * MAX_RESPONSE_BYTES}
    body = SHORT | {"input": [{"role": "user", "content": [part]}]}
    answer = client.post(RESPONSES, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "response_too_large"
    assert app.responses._store.stored_bytes < MAX_RESPONSE_BYTES
    assert client.post(RESPONSES, json=body | {"store": False}).status_code == 200


def test_an_output_too_large_to_store_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(worded(TEMPLATE)) as (url, app), httpx.Client(base_url=url, timeout=300) as client:
        store = ResponseStore(max_response_bytes=1200)
        monkeypatch.setattr(app.responses, "_store", store)
        body = SHORT | {"max_output_tokens": 50, "ignore_eos": True, "top_logprobs": 20}
        answer = client.post(RESPONSES, json=body).json()
        assert answer["store"] is False and answer["output"]
        assert client.get(f"{RESPONSES}/{answer['id']}").status_code == 404
        started = client.post(RESPONSES, json=body | {"background": True}).json()
        failed = in_the_end(client, started["id"])
        assert failed["status"] == "failed" and failed["error"]["code"] == "response_too_large"
        assert store.stored_bytes <= 1200


def in_the_end(client: httpx.Client, name: str) -> dict[str, Any]:
    """Return a background response that is no longer in progress."""
    end_s = time.monotonic() + 120
    while (response := client.get(f"{RESPONSES}/{name}").json())["status"] == "in_progress":
        assert time.monotonic() < end_s
        time.sleep(0.005)
    answer: dict[str, Any] = response
    return answer


def test_deleting_a_background_response_cancels_it(
    server: tuple[httpx.Client, App],
) -> None:
    client, app = server
    name = client.post(RESPONSES, json=LONG).json()["id"]
    wait_until(lambda: app.service.engine.used_pages > 0)
    stored = app.responses._store.stored_bytes
    assert client.delete(f"{RESPONSES}/{name}").json()["deleted"] is True
    assert client.get(f"{RESPONSES}/{name}").status_code == 404
    assert client.delete(f"{RESPONSES}/{name}").status_code == 404
    wait_until(lambda: app.service.open_requests == 0, 20)
    assert client.get(f"{RESPONSES}/{name}").status_code == 404
    assert app.responses._store.stored_bytes == stored and not app.responses._background


def test_a_cancelled_background_response_keeps_its_output(
    server: tuple[httpx.Client, App],
) -> None:
    client, app = server
    name = client.post(RESPONSES, json=LONG).json()["id"]

    def has_output() -> bool:
        output = client.get(f"{RESPONSES}/{name}").json()["output"]
        return bool(output and output[0]["content"][0]["text"])

    wait_until(has_output)
    answer = client.post(f"{RESPONSES}/{name}/cancel").json()
    assert answer["status"] == "cancelled" and answer["output"][0]["status"] == "incomplete"
    wait_until(lambda: app.service.open_requests == 0, 20)
    assert client.get(f"{RESPONSES}/{name}").json() == answer
    assert client.post(f"{RESPONSES}/{name}/cancel").json() == answer
    assert client.delete(f"{RESPONSES}/{name}").status_code == 200
    assert client.get(f"{RESPONSES}/{name}").status_code == 404


def test_shutdown_does_not_wait_for_background_responses() -> None:
    engine = worded(TEMPLATE, max_seq_len=40_000)
    body = LONG | {"max_output_tokens": 39_000}
    with served(engine) as (url, app):
        httpx.post(url + RESPONSES, json=body, timeout=300)
        wait_until(lambda: app.service.open_requests == 1)
        began_s = time.monotonic()
    assert engine.used_pages == 0 and time.monotonic() - began_s < 20


def test_a_failed_background_response_has_the_error(server: tuple[httpx.Client, App]) -> None:
    """This includes errors of the server: the response does not stay in progress."""
    client, app = server
    for error, code in ((ApiError(503, "gone", code="gone"), "gone"), (KeyError("x"), None)):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app.responses, "_finish", fail)
            name = client.post(RESPONSES, json=LONG).json()["id"]
            failed = in_the_end(client, name)
        assert failed["status"] == "failed" and failed["error"]["code"] == code
        assert json.dumps(failed)
    app.service.engine.session.abort().wait(60)
