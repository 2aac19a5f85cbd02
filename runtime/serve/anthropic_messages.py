"""``/v1/messages``: Anthropic's messages API over the chats of this server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specbuild.runtime.serve.anthropic_fields import MessageFields, PromptFields
from specbuild.runtime.serve.chat import Chat, available_tools, chat_prompt
from specbuild.runtime.serve.event_stream import EventSource, EventStream
from specbuild.runtime.serve.messages import template_messages
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.token_batches import TokenBatch

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {}}


class AnthropicMessages:
    """Handles messages and the count of their tokens."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: MessageFields) -> Mapping[str, Any] | EventStream:
        """Return a message, or the events of its stream."""
        chat_body = body.chat(**body.output_fields)
        # A model without reasoning needs no limit.
        if body.budget_tokens is not None and self._has_reasoning_budget:
            chat_body.thinking_token_budget = body.budget_tokens
        answer = await Chat(self._serving).answer(chat_body)
        if not isinstance(answer, Mapping):
            return EventStream(answer.batches, _MessageEvents(answer.source))
        (choice,) = answer["choices"]
        return _message(answer) | {
            "content": list(_blocks(choice["message"])),
            **_end(choice),
            "usage": _usage(answer["usage"]),
        }

    @property
    def _has_reasoning_budget(self) -> bool:
        """Whether the model's reasoning can be limited."""
        output_format = self._serving.output_format
        return output_format is not None and output_format.limits_reasoning

    async def count(self, body: PromptFields) -> Mapping[str, Any]:
        """Return the number of tokens of a prompt."""
        chat_body = body.chat()
        self._serving.model(chat_body.model)
        tools = available_tools(self._serving, chat_body.tools, chat_body.tool_choice)
        messages = template_messages(chat_body.messages)
        variables = chat_body.template_variables
        prompt = await chat_prompt(self._serving, messages, tools, variables)
        return {"input_tokens": len(prompt.ids)}


def _message(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without content, from the answer of a chat or its first chunk."""
    return {
        "id": answer["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer.get("usage") or _NO_USAGE),
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return token counts. Input tokens are those that were not cached."""
    cached = usage["prompt_tokens_details"].get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return why a message ended."""
    stop_text = choice.get("stop_reason")
    if isinstance(stop_text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
    return {"stop_reason": _STOP_REASONS[choice["finish_reason"]], "stop_sequence": None}


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message.get("reasoning"):
        yield {"type": "thinking", "thinking": message["reasoning"], "signature": ""}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


class _ContentEvents:
    """The events of content blocks, one after another."""

    def __init__(self) -> None:
        self._index = -1
        # The kind of the open block; for a call, with its number.
        self._open: object = None

    def of(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk's delta."""
        if delta.get("reasoning"):
            yield from self._begin(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            yield self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
        if delta.get("content"):
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                block = {
                    "type": "tool_use", "id": call["id"], "name": function["name"], "input": {},
                }  # fmt: skip
                yield from self._begin(call["index"], block)
            if function["arguments"]:
                partial = {"type": "input_json_delta", "partial_json": function["arguments"]}
                yield self._delta(partial)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block."""
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, kind: object, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self.end()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _MessageEvents(EventSource):
    """The events of a streamed message, from the chunks of a chat."""

    has_types = True

    def __init__(self, chat: EventSource) -> None:
        self._chat = chat
        self._content = _ContentEvents()
        self._usage = _usage(_NO_USAGE)
        self._end: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}

    @property
    def has_ended(self) -> bool:
        """Whether a stop string ended the output."""
        return self._chat.has_ended

    def begin(self) -> Iterator[Mapping[str, Any]]:
        """Yield the start of the message."""
        for chunk in self._chat.begin():
            yield {"type": "message_start", "message": _message(chunk)}
            yield from self._events(chunk)

    def add(self, batch: TokenBatch) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a batch."""
        for chunk in self._chat.add(batch):
            yield from self._events(chunk)

    def end(self) -> Iterator[Mapping[str, Any]]:
        """Yield the end of the message, with its token counts."""
        for chunk in self._chat.end():
            yield from self._events(chunk)
        yield from self._content.end()
        yield {"type": "message_delta", "delta": self._end, "usage": self._usage}
        yield {"type": "message_stop"}

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if chunk.get("usage") is not None:
            self._usage = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            yield from self._content.of(choice["delta"])
            if choice["finish_reason"] is not None:
                self._end = _end(choice)
