"""Chat messages: conversion from the form that clients send to the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specbuild.runtime.serve.errors import invalid_value, unsupported

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Reasoning efforts of requests, and the corresponding ones of chat templates.
EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template: content is text, arguments of tool calls are objects.

    The template gets every role. Text parts are joined with newlines, as in vLLM. Reasoning of
    earlier turns, sent as ``reasoning`` or ``reasoning_content``, is stored under every name that
    templates use.
    Raises ApiError for the first message that is invalid.
    """
    if not messages:
        raise invalid_value("messages", "messages is empty; give at least one")
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid_value(f"{path}.role", f"{path}.role is {role!r}, must be a name")
    converted: dict[str, Any] = {"role": role, "content": _text(message.get("content"), path)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            converted[name] = message[name]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        converted |= {"thinking": reasoning, "reasoning_content": reasoning}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise invalid_value(f"{path}.tool_calls", f"{path}.tool_calls is not a list of calls")
        converted["tool_calls"] = [
            _call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    if converted["content"] is None and "tool_calls" not in converted and role != "assistant":
        raise invalid_value(f"{path}.content", f"{path}.content is missing")
    return converted


def _text(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(
            f"{path}.content", f"{path}.content is neither text nor a list of parts"
        )
    texts = []
    for i, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if part_type not in _TEXT_PARTS or not isinstance(text, str):
            raise unsupported(
                f"{path}.content.{i}", f"only text parts are accepted, this part is {part_type!r}"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_value(path, f"{path} has no function with a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # Arguments that a model wrote may be invalid JSON; the template gets them unchanged.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def count_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tool calls in messages for a template."""
    return sum(len(message.get("tool_calls", ())) for message in messages)


def with_call_ids(
    messages: Sequence[Mapping[str, Any]], call_id: Callable[[str, int], str]
) -> list[dict[str, Any]]:
    """Return messages for a template with new ids of tool calls.

    ``call_id`` maps a function's name and the number of earlier calls to an id. Tool results get
    the new id of their call.
    """
    new_ids: dict[str, str] = {}
    converted, count = [], 0
    for message in messages:
        message_copy = dict(message)
        if "tool_calls" in message_copy:
            calls = []
            for call in message_copy["tool_calls"]:
                new_ids[call["id"]] = call_id(call["function"]["name"], count)
                calls.append({**call, "id": new_ids[call["id"]]})
                count += 1
            message_copy["tool_calls"] = calls
        if message_copy.get("tool_call_id") in new_ids:
            message_copy["tool_call_id"] = new_ids[message_copy["tool_call_id"]]
        converted.append(message_copy)
    return converted


def tool_list(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in the form that templates expect. ApiError if one is not a function."""
    if not tools:
        return None
    return [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(
            path, f"only function tools are accepted, this tool is {tool.get('type')!r}"
        )
    # The Responses API has the function's fields next to its type.
    function = tool.get("function", {k: v for k, v in tool.items() if k not in ("type", "strict")})
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid_value(path, f"{path} has no name")
    fields = {"description": "", "parameters": None} | {
        name: value for name, value in function.items() if value is not None
    }
    return {"type": "function", "function": fields}
