"""No request field that changes the output is ignored: the table of fields, and the routes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.responses import response_create_params
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params.reasoning import Reasoning
from serve.served import NAME, TEMPLATE, served, worded

from specbuild.runtime.serve import request_fields
from specbuild.runtime.serve.chat_choice import ChatFields
from specbuild.runtime.serve.completions import CompletionFields
from specbuild.runtime.serve.request_fields import (
    IGNORED,
    OTHER_SERVERS,
    REFUSED,
    RefusedField,
    field_states,
)
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields

HELLO = [{"role": "user", "content": "bcd"}]
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "bcd", "max_tokens": 8, "temperature": 0},
    "chat": {"messages": HELLO, "max_tokens": 8, "temperature": 0},
    "responses": {"input": "bcd", "max_output_tokens": 8, "temperature": 0},
    "tokenize": {"messages": HELLO},
    "detokenize": {"tokens": [1, 2]},
    "messages": {"messages": HELLO, "max_tokens": 8, "temperature": 0},
    "count_tokens": {"messages": HELLO},
}
MODELS = (CompletionFields, ChatFields, ResponseFields, TokenizeFields, DetokenizeFields)
STATES = {body.route: field_states(body) for body in MODELS}
# The request classes of vLLM 0.33, in addition to OpenAI's fields: its protocol.py files.
VLLM_GENERATION = [
    "use_beam_search",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "request_id",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "priority",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
    "spaces_between_special_tokens",
    "response_format",
    "stream_options.include_usage",
    "stream_options.continuous_usage_stats",
    "structured_outputs.disable_any_whitespace",
    "structured_outputs.disable_additional_properties",
    "structured_outputs.whitespace_pattern",
    "structured_outputs.structural_tag",
]
VLLM: dict[str, list[str]] = {
    "completions": [*VLLM_GENERATION, "prompt_embeds"],
    "chat": [
        *VLLM_GENERATION,
        *["echo", "documents", "chat_template", "chat_template_kwargs", "media_io_kwargs"],
        *["mm_processor_kwargs", "return_prompt_text", "include_reasoning"],
        *["add_generation_prompt", "continue_final_message"],
    ],
    "responses": [
        "logit_bias",
        "top_k",
        "request_id",
        "mm_processor_kwargs",
        "priority",
        "cache_salt",
        "seed",
        "stop",
        "enable_response_messages",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "previous_input_messages",
        "previous_response",
        "structured_outputs",
        "repetition_penalty",
        "ignore_eos",
        "vllm_xargs",
    ],
    "tokenize": [
        "model",
        "prompt",
        "messages",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "tools",
    ],
    "detokenize": ["model", "tokens"],
}
# Fields of older versions of vLLM.
VLLM_BEFORE = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logits_processors",
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        served(worded(TEMPLATE)) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def post(client: httpx.Client, route: str, **fields: Any) -> httpx.Response:
    body = {"model": NAME} | BODIES[route] | fields
    return client.post(PATHS[route], json=body)


def without_ids(text: str) -> Any:
    """Return an answer without parts that differ between two equal requests."""

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        random = ("id", "created", "created_at", "prompt_tokens_details", "input_tokens_details")
        return {name: value for name, value in pairs if name not in random}

    return json.loads(text, object_pairs_hook=read)


def test_every_field_of_openai_is_in_the_table() -> None:
    typed: dict[str, list[tuple[str, type]]] = {
        "completions": [
            ("", completion_create_params.CompletionCreateParamsBase),
            ("", completion_create_params.CompletionCreateParamsStreaming),
            ("stream_options.", ChatCompletionStreamOptionsParam),
        ],
        "chat": [
            ("", chat_create_params.CompletionCreateParamsBase),
            ("", chat_create_params.CompletionCreateParamsStreaming),
            ("stream_options.", ChatCompletionStreamOptionsParam),
        ],
        "responses": [
            ("", response_create_params.ResponseCreateParamsBase),
            ("", response_create_params.ResponseCreateParamsStreaming),
            ("stream_options.", response_create_params.StreamOptions),
            ("reasoning.", Reasoning),
            ("text.", ResponseTextConfigParam),
        ],
    }
    for route, parts in typed.items():
        names = {prefix + name for prefix, params in parts for name in params.__annotations__}
        # test_structured.py tests the format itself.
        assert names - {"text.format"} <= STATES[route].keys(), route


@pytest.mark.parametrize("route", VLLM)
def test_every_field_of_vllm_is_in_the_table(route: str) -> None:
    older = VLLM_BEFORE if route in ("completions", "chat") else []
    assert {*VLLM[route], *older} <= STATES[route].keys()


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return a field, or a key of an object."""
    field, _, key = name.partition(".")
    return {field: {key: value}} if key else {name: value}


REFUSALS = [(f, route) for f in (*REFUSED, *OTHER_SERVERS) for route in f.routes]


@pytest.mark.parametrize(("field", "route"), REFUSALS, ids=lambda x: getattr(x, "name", x))
def test_the_error_names_a_rejected_field(
    client: httpx.Client, field: RefusedField, route: str
) -> None:
    values: list[Any] = [{"some": 1}, "some", 7, *([0] if field.name == "prompt_logprobs" else [])]
    for value in values:
        fields = nested(field.name, value)
        if field.name == "best_of":
            fields = {"best_of": 7}
        # The type of a ``model`` field is checked first, and that error names it too.
        answer = post(client, route, **fields)
        assert answer.status_code == 400, answer.text
        # Anthropic's errors name no parameter.
        if route not in ("messages", "count_tokens"):
            assert answer.json()["error"]["param"] == field.name
        assert field.name in answer.json()["error"]["message"]


@pytest.mark.parametrize(("field", "route"), REFUSALS, ids=lambda x: getattr(x, "name", x))
def test_default_values_of_rejected_fields_are_accepted(
    client: httpx.Client, field: RefusedField, route: str
) -> None:
    plain = without_ids(post(client, route).text)
    for value in (None, *field.neutral):
        fields = nested(field.name, value)
        if field.name.startswith("stream_options"):
            fields |= {"stream": True}
            assert post(client, route, **fields).status_code == 200
            continue
        if field.name.startswith("structured_outputs"):
            assert post(client, route, **fields).status_code == 200
            continue
        answer = post(client, route, **fields)
        assert answer.status_code == 200, answer.text
        assert without_ids(answer.text) == plain


@pytest.mark.parametrize(
    ("name", "route"), [(f.name, route) for f in IGNORED for route in f.routes]
)
def test_an_ignored_field_changes_nothing(client: httpx.Client, name: str, route: str) -> None:
    plain = without_ids(post(client, route).text)
    for value in (True, {"some": 1}, "some", 7):
        if name == "stream_options.include_usage" and value is not True:
            continue
        answer = post(client, route, **nested(name, value))
        assert answer.status_code == 200, answer.text
        assert without_ids(answer.text) == plain


def test_unknown_fields_are_ignored_and_logged_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(request_fields.log, "handle", records.append)
    monkeypatch.setattr(request_fields, "_LOGGED", set())
    plain = without_ids(post(client, "chat").text)
    for _ in range(2):
        unknown = {"temprature": 2, "x\n" * 99: 1}
        assert without_ids(post(client, "chat", **unknown).text) == plain
    lines = [record.getMessage() for record in records]
    assert len(lines) == 2 and any("'temprature'" in line for line in lines)
    assert all("\n" not in line and len(line) < 120 for line in lines)


def usages(client: httpx.Client, route: str, **fields: Any) -> list[Mapping[str, Any]]:
    """Return the usage of each chunk of a stream, or an empty dict."""
    answer = post(client, route, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line).get("usage", {}) for line in lines[:-1]]


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_continuous_usage_increases(client: httpx.Client, route: str) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunk_usages = usages(client, route, stream_options=both, min_tokens=8)
    counts = [usage["completion_tokens"] for usage in chunk_usages]
    assert counts == sorted(counts) and counts[-1] == 8 and len(set(counts)) > 1
    assert len({usage["prompt_tokens"] for usage in chunk_usages}) == 1
    assert all(
        u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in chunk_usages
    )
    last_only = usages(client, route, stream_options={"include_usage": True}, min_tokens=8)
    assert [bool(usage) for usage in last_only] == [False] * (len(last_only) - 1) + [True]
    assert last_only[-1]["completion_tokens"] == 8
    # As in vLLM.
    assert not any(usages(client, route, stream_options={"continuous_usage_stats": True}))
