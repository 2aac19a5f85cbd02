"""How a chat template takes the tool calls of earlier turns: found by rendering a small chat.

Templates differ. DeepSeek-V3's adds the arguments to a text and shows a call only where the content
is null; Qwen3's looks for marks in the content, which has to be a text; GLM's walks through the
arguments, which have to be an object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.errors import RequestError

Messages = Sequence[Mapping[str, Any]]

_NAME, _KEY, _VALUE, _TEXT = "probe_function", "probe_key", "probe_value", "probe_text"
# Arguments as Python writes an object, and as JSON of a text: the template expected the other form.
_MISREAD = (f"'{_KEY}'", f'\\"{_KEY}')


@dataclass(frozen=True)
class CallShape:
    """A form of messages with calls: the content of one without text, and what arguments are."""

    empty_content: str | None
    arguments_as_text: bool

    def applied(self, message: Mapping[str, Any], text: str | None) -> dict[str, Any]:
        """Return the message in this form, with ``text`` as its content."""
        calls = [self._call(call) for call in message["tool_calls"]]
        return {**message, "content": text or self.empty_content, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


# The first of these that the template shows as it should is the one.
_SHAPES = [CallShape(content, as_text) for as_text in (False, True) for content in ("", None)]


@dataclass(frozen=True)
class CallHistory:
    """The form in which a template shows calls, with and without text; None where it has none."""

    alone: CallShape | None
    with_text: CallShape | None

    @classmethod
    def of(cls, render: Callable[[Messages], str]) -> CallHistory:
        """Probe a template. ``render`` raises RequestError where the template refuses a chat."""
        return cls(_shape(render, None), _shape(render, _TEXT))

    def fitted(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return the messages as the template takes them: contents of assistants are texts.

        RequestError where the template would leave out a call.
        """
        return [self._fitted(i, message) for i, message in enumerate(messages)]

    def _fitted(self, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.get("role") != "assistant":
            return message
        content = message.get("content")
        if not message.get("tool_calls"):
            return {**message, "content": ""} if content is None else message
        has_text = not isinstance(content, str | None) or bool(content and content.strip())
        shape = self.with_text if has_text else self.alone
        if shape is None:
            only_beside_text = has_text and self.alone is not None
            raise RequestError(
                f"message {number} has tool_calls{' beside its content' * only_beside_text}, which "
                f"the chat template leaves out of the prompt; leave "
                f"{'the content' if only_beside_text else 'them'} out, or use a template that "
                "shows them"
            )
        return shape.applied(message, content if has_text else None)


def _shape(render: Callable[[Messages], str], text: str | None) -> CallShape | None:
    """The form in which a chat with a call renders with the call; None where it is left out.

    Where the template refuses such chats in every form, it refuses real ones in its own words.
    """
    rendered = False
    for shape in _SHAPES:
        for messages in _probes(shape, text):
            try:
                prompt = render(messages)
            except RequestError:
                continue
            rendered = True
            if _NAME in prompt and _VALUE in prompt and not any(m in prompt for m in _MISREAD):
                return shape
    return None if rendered else _SHAPES[0]


def _probes(shape: CallShape, text: str | None) -> list[Messages]:
    """A chat whose assistant calls a function, with the function's answer and without."""
    call_id = "probe0000"  # some templates take ids of nine letters and digits
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    calls = [{"id": call_id, "type": "function", "function": function}]
    chat = [
        {"role": "user", "content": "a"},
        shape.applied({"role": "assistant", "tool_calls": calls}, text),
        {"role": "tool", "tool_call_id": call_id, "content": "b"},
    ]
    return [chat, chat[:2]]
