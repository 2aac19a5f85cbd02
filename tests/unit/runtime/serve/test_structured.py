"""Response formats over HTTP: content, calls and responses, with each output parser."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from serve.lettered import TEMPLATE, lettered_engine, token_id
from serve.served import NAME, served

from specbuild.runtime.guides.compiler import LIMITS
from specbuild.runtime.serve import service

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 40},
            "maxItems": 3,
        },
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
ENDS = {token_id(word): 4 for word in ("<|end|>", "</think>", "<eos>")}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}


def tool(name: str, schema: dict[str, Any] | None = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def client_of(parser: str, template: str = TEMPLATE) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        engine = lettered_engine(patch, template)
        with (
            served(engine, parser=parser) as (url, _),
            httpx.Client(base_url=url, timeout=300) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def harmony() -> Iterator[httpx.Client]:
    yield from client_of("harmony")


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    yield from client_of("none")


@pytest.fixture(scope="module")
def marked() -> Iterator[httpx.Client]:
    yield from client_of("think", TEMPLATE + "<think>{# <tool_call> #}")


# As in Qwen3: the end of the prompt determines whether the model reasons.
THINKING = (
    "{%- for m in messages %}{{ m.content }}\n{% endfor -%}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{%- elif enable_thinking is defined %}<think>\n{% endif %}{# <tool_call> #}"
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[httpx.Client]:
    yield from client_of("auto", THINKING)


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 400,
        # The toy rarely ends an output that may continue, so a bias makes it end its reasoning.
        "logit_bias": ENDS,
    }
    answer = client.post(CHAT, json=body | fields)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


SAMPLED = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.8, "top_k": 9, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", SAMPLED)
def test_content_matches_its_schema_with_every_parser(
    fields: dict[str, Any], plain: httpx.Client, harmony: httpx.Client, marked: httpx.Client
) -> None:
    for client in (plain, marked, harmony):
        choice = chat(client, response_format=FORMAT, **fields)
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert fields != SAMPLED[0] or choice["message"]["reasoning"]


@pytest.mark.parametrize("form", [FORMAT, None])
def test_no_reasoning_if_the_prompt_ends_it(
    form: dict[str, Any] | None, thinking: httpx.Client
) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "response_format": form}
    if form is None:
        fields["logit_bias"] = {token_id("a"): 50}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice = chat(thinking, **fields, **off)
    assert choice["message"]["content"] and "reasoning" not in choice["message"]
    if form is not None:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    choice = chat(thinking, **fields, chat_template_kwargs={"enable_thinking": True})
    assert choice["message"]["reasoning"]


def test_streams_and_responses_follow_the_end_of_the_prompt(thinking: httpx.Client) -> None:
    body: dict[str, Any] = {"model": NAME, "temperature": 0, "logit_bias": {token_id("a"): 50}}
    body |= {"chat_template_kwargs": {"enable_thinking": False}, "stream": True}
    fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    with thinking.stream("POST", CHAT, json=body | fields) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: {" in line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert any(delta.get("content") for delta in deltas)
    assert not any("reasoning" in delta for delta in deltas)
    body["stream"] = False
    for thinks, kind in ((False, "message"), (True, "reasoning")):
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
        fields = {"input": "Hello", "max_output_tokens": 20}
        response = thinking.post(RESPONSES, json=body | fields | kwargs).json()
        assert response["output"][0]["type"] == kind


def test_json_object_format_gives_an_object(plain: httpx.Client) -> None:
    bias = {token_id(letter): 20 for letter in '"}'}
    choice = chat(plain, response_format={"type": "json_object"}, logit_bias=bias, temperature=0)
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "second"}}]
)
@pytest.mark.parametrize("fields", SAMPLED)
def test_a_required_call_is_generated(
    choice: Any, fields: dict[str, Any], harmony: httpx.Client, marked: httpx.Client
) -> None:
    tools = [tool("first"), tool("second")]
    for client in (harmony, marked):
        result = chat(client, tools=tools, tool_choice=choice, **fields)
        assert result["finish_reason"] == "tool_calls"
        assert not (result["message"]["content"] or "").strip()
        calls = [call["function"] for call in result["message"]["tool_calls"]]
        names = {"first", "second"} if choice == "required" else {"second"}
        assert {call["name"] for call in calls} <= names
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
        assert len(calls) == 1 or (client is marked and choice == "required")


def test_parallel_tool_calls_false_gives_one_call(marked: httpx.Client) -> None:
    fields = {"tools": [tool("f")], "tool_choice": "required", "parallel_tool_calls": False}
    assert len(chat(marked, temperature=0, **fields)["message"]["tool_calls"]) == 1


def test_tool_choice_auto_gives_an_answer_or_a_call(harmony: httpx.Client) -> None:
    for letter, expected_field in (("f", "content"), ("c", "tool_calls")):
        bias = {token_id(letter): 50, token_id("a"): -50}
        choice = chat(
            harmony, tools=[tool("f")], response_format=FORMAT, logit_bias=bias, temperature=0
        )
        assert choice["message"][expected_field]


def test_a_stream_has_the_same_structured_output(harmony: httpx.Client) -> None:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": FORMAT,
        "temperature": 0,
        "logit_bias": ENDS,
    }
    whole = harmony.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    with harmony.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: {" in line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
    ({"guided_choice": ["yes", 'n"o', "é\\n"]}, 'yes|n"o|é\\\\n'),
    ({"guided_grammar": 'start: "x" D\nD: /[0-9]{2}/'}, "x[0-9]{2}"),
    ({"guided_grammar": 'root ::= "x" d d\nd ::= [0-9]'}, "x[0-9]{2}"),
    ({"guided_json": {"enum": [1, "b"]}}, '1|"b"'),
    ({"guided_json": '{"const": null}'}, "null"),
    ({"structured_outputs": {"regex": "a{4}", "json": None}}, "a{4}"),
    ({"structured_outputs": {"choice": ["up"]}}, "up"),
    ({"response_format": {"type": "text"}}, "(?s).*"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS)
def test_completions_match_their_format(
    fields: dict[str, Any], pattern: str, plain: httpx.Client
) -> None:
    body = {"model": NAME, "prompt": ["One", "Two"], "max_tokens": 30, "n": 2, "seed": 1}
    choices = plain.post(COMPLETIONS, json=body | fields).json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert re.fullmatch(pattern, choice["text"]), choice


def test_a_response_matches_and_states_its_format(harmony: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
    body = {"model": NAME, "input": "Hello", "temperature": 0, "logit_bias": ENDS}
    response = harmony.post(RESPONSES, json=body | {"text": {"format": form}}).json()
    assert response["status"] == "completed" and response["text"]["format"] == form
    text = next(item for item in response["output"] if item["type"] == "message")["content"][0][
        "text"
    ]
    jsonschema.validate(json.loads(text), SCHEMA)
    named = {"type": "function", "name": "f", "parameters": SCHEMA}
    fields = {"tools": [named], "tool_choice": {"type": "function", "name": "f"}}
    response = harmony.post(RESPONSES, json=body | fields).json()
    call = next(item for item in response["output"] if item["type"] == "function_call")
    assert call["name"] == "f"
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema",
        "no schema",
    ),
    ({"response_format": FORMAT, "guided_json": {}}, "response_format", "both constrain"),
    ({"guided_regex": "(a"}, "guided_regex", "cannot be compiled"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "cannot be"),
    ({"guided_choice": []}, "guided_choice", "1 to"),
    ({"guided_json": "{"}, "guided_json", "no JSON Schema"),
    ({"guided_json": {"type": "string", "format": "iri"}}, "guided_json", "iri"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "must be json, regex"),
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]},
        "tool_choice",
        "'g'",
    ),
    ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice", "auto, none"),
    (
        {"tool_choice": "required", "tools": [tool("f", {"type": 7})]},
        "tool_choice",
        "cannot be compiled",
    ),
    (
        {"tool_choice": "required", "tools": [tool("f", {"enum": ["x" * (1 << 18)]})]},
        "tools.0.function.parameters",
        "bytes",
    ),
]


@pytest.mark.parametrize(("fields", "param", "reason"), BAD)
def test_rejects_an_invalid_format_with_its_field(
    fields: dict[str, Any], param: str, reason: str, harmony: httpx.Client
) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
    answer = harmony.post(CHAT, json=body | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and reason in error["message"], error
    assert error["param"].startswith(param.partition(".function")[0]), error


def test_a_strict_schema_rejects_unsupported_keywords(
    plain: httpx.Client,
) -> None:
    schema = {"type": "object", "maxProperties": 0, "uniqueItems": True, "format": "iri"}
    for strict, status in ((True, 400), (False, 200)):
        form = {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": [1], "dependentSchemas": schema}, "strict": strict},
        }
        body = {"model": NAME, "prompt": "One", "response_format": form}
        assert plain.post(COMPLETIONS, json=body).status_code == status


def test_a_grammar_without_allowed_tokens_fails_its_request(
    plain: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the bracket, each property adds items to a row of the grammar.
    monkeypatch.setitem(LIMITS, "max_items_in_row", 500)
    stuck = {"guided_json": {"type": "object", "properties": {f"q{i}": {} for i in range(300)}}}
    body = {"model": NAME, "prompt": "One", "max_tokens": 60, "temperature": 0}
    answer = plain.post(COMPLETIONS, json=body | stuck)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "guide_failed")
    assert plain.post(COMPLETIONS, json=body | {"max_tokens": 3}).status_code == 200


def _chain(count: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$defs": defs | {f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def test_rejects_formats_that_nest_too_deeply(plain: httpx.Client, harmony: httpx.Client) -> None:
    """The recursion of native code would overflow its stack and end the process."""
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000))
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": _chain(3000)}}
    for fields in (
        {"guided_json": _chain(3000)},
        {"response_format": formatted},
        {"guided_grammar": f'start: r0\n{rules}\nr3000: "b"'},
        {"structured_outputs": {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}},
    ):
        body = {"model": NAME, "prompt": "One", "max_tokens": 2, **fields}
        answer = plain.post(COMPLETIONS, json=body)
        assert answer.status_code == 400, answer.text
        assert "nested too deeply" in answer.json()["error"]["message"]
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
    called = {"tools": [tool("f", _chain(3000))], "tool_choice": "required"}
    answer = harmony.post(CHAT, json=chat | called)
    assert answer.status_code == 400 and "nested too deeply" in answer.text
    assert plain.post(COMPLETIONS, json={"model": NAME, "prompt": "One"}).status_code == 200


def test_a_format_with_slow_masks_delays_its_own_request_only(plain: httpx.Client) -> None:
    """Each of its masks tokenizes the rest of a text of 200 kB."""
    body = {"model": NAME, "prompt": "One", "max_tokens": 6, "temperature": 0}
    word = "x" + "ab " * 60_000
    alone = plain.post(COMPLETIONS, json=body).json()["choices"]
    slow: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: slow.append(plain.post(COMPLETIONS, json=body | {"guided_choice": [word]}))
    )
    thread.start()
    beside = 0
    while thread.is_alive():
        assert plain.post(COMPLETIONS, json=body).json()["choices"] == alone
        beside += 1
    thread.join()
    (choice,) = slow[0].json()["choices"]
    assert word.startswith(choice["text"]) and choice["finish_reason"] == "length"
    assert len(choice["text"]) > 1 and beside > 1


def test_large_formats_do_not_delay_other_requests(
    plain: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": NAME, "prompt": "One", "max_tokens": 2}
    large = {"type": "object", "properties": {f"p{i}": {} for i in range(1200)}}
    done: list[httpx.Response] = []

    def ask(count: int) -> None:
        form = large | {"title": str(count)}
        done.append(plain.post(COMPLETIONS, json=body | {"guided_json": form}))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    free_s = []
    while any(thread.is_alive() for thread in threads):
        started_s = time.perf_counter()
        assert plain.get("/health").status_code == 200
        free_s.append(time.perf_counter() - started_s)
    assert [answer.status_code for answer in done] == [200] * 4 and free_s, done[0].text
    monkeypatch.setattr(service, "MAX_COMPILE_S", 1e-4)
    late = plain.post(COMPLETIONS, json=body | {"guided_json": large | {"title": "late"}})
    assert late.status_code == 503 and late.headers["Retry-After"] == "1"
    assert late.json()["error"]["param"] == "guided_json"
