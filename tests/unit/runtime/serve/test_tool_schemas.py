"""Schemas of tools: grammars that enforce them, and schemas with many paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from serve.lettered import TEMPLATE
from serve.test_structured import SCHEMA, chat, client_of, tool
from serve.test_tool_call_formats import output
from serve.written_calls import WRITERS

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.tool_call_formats import TOOL_CALL_FORMATS


def _doubling(levels: int) -> dict[str, Any]:
    """Return a schema with ``3 ** levels`` paths, and others that refer back to themselves."""
    defs: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 3} for i in range(levels)
    }
    defs[f"a{levels}"] = {"type": "integer"}
    defs["loop"] = {"anyOf": [{"$ref": "#/$defs/loop"}] * 9 + [{"type": "integer"}]}
    properties = {"x": {"$ref": "#/$defs/a0"}, "y": {"$ref": "#/$defs/loop"}}
    return {"type": "object", "properties": properties, "$defs": defs}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["glm47", "qwen3_coder"])
def test_a_schema_with_many_paths_is_read_once(form: str) -> None:
    """Reading arguments and building grammars takes time by size:

    3 ** 14 paths would take minutes.
    """
    schema = _doubling(14)
    write = WRITERS[form]
    made = output(form, write([("f", {"x": 5, "y": 6})]), tools=[tool("f", schema)])
    assert [json.loads(call.arguments) for call in made.calls] == [{"x": 5, "y": 6}]
    guide = Guide.json(schema, lenient=True, name="tools.0.parameters")
    assert len(TOOL_CALL_FORMATS[form].grammar("p", "f", guide, json.dumps, json.dumps).parts) < 20


@pytest.mark.timeout(60)
def test_the_size_of_a_grammar_is_bounded() -> None:
    """Each argument that refers to definitions would contain a copy of them."""
    shared = {"big": {"enum": list(range(20_000))}, "n": {"type": "integer"}}
    listed = {"type": "array", "items": {"$ref": "#/$defs/n"}}
    properties = {f"x{i}": listed for i in range(900)}
    guide = Guide.json({"properties": properties, "$defs": shared}, name="tools.0.parameters")
    with pytest.raises(RequestError, match=r"tools\.0\.parameters takes more"):
        TOOL_CALL_FORMATS["glm47"].grammar("p", "f", guide, json.dumps, json.dumps)
    odd = Guide.json({"properties": {"x": {"type": "integer"}}, "required": 5}, name="f")
    assert TOOL_CALL_FORMATS["glm47"].grammar("p", "f", odd, json.dumps, json.dumps).parts


@pytest.fixture(scope="module", params=[*WRITERS])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    shown = WRITERS[request.param]([("f", {})])
    yield from client_of("auto", f"{TEMPLATE}{{# {shown} #}}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
def test_outputs_of_grammars_can_be_parsed(client: httpx.Client, choice: Any) -> None:
    made = chat(client, tools=[tool("a"), tool("b")], tool_choice=choice, temperature=1, seed=2)
    calls = [call["function"] for call in made["message"]["tool_calls"]]
    assert made["finish_reason"] == "tool_calls" and calls
    assert {call["name"] for call in calls} <= ({"a", "b"} if choice == "required" else {"b"})
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


NESTED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Place": {"type": "object", "properties": {
        "name": {"type": "string"}, "near": {"$ref": "#/$defs/Place"}}, "required": ["name"]}},
    "properties": {
        "first": {"type": ["integer", "null"], "maximum": 9},
        "place": {"$ref": "#/$defs/Place"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "either": {"anyOf": [{"const": "x"}, {"type": "number", "minimum": 1, "maximum": 2}]},
    },
    "required": ["place", "flags"],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_grammars_of_gemma_allow_nested_values(seed: int) -> None:
    shown = WRITERS["gemma4"]([("f", {})])
    for client in client_of("auto", f"{TEMPLATE}{{# {shown} #}}"):
        made = chat(client, tools=[tool("f", NESTED)], tool_choice="required", temperature=1,
                    seed=seed, max_tokens=400)  # fmt: skip
        # there are none if the output is truncated
        for call in made["message"].get("tool_calls", ()):
            jsonschema.validate(json.loads(call["function"]["arguments"]), NESTED)
        assert made["finish_reason"] in ("tool_calls", "length")


def test_a_strict_schema_rejects_what_gemma_cannot_write() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    grammar = TOOL_CALL_FORMATS["gemma4"].grammar
    with pytest.raises(RequestError, match="has 'pattern', which this model's call format"):
        grammar("p", "f", Guide.json(schema, name="f"), json.dumps, json.dumps)
    guide = Guide.json(schema, lenient=True, name="f")
    assert grammar("p", "f", guide, json.dumps, json.dumps).rules
