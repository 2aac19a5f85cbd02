"""The items of a response and its stream events, from the deltas of an output."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.parsers.parser import Delta

Item = dict[str, Any]
ResponseEvent = dict[str, Any]


class Items:
    """The items of one response, in the order of the output.

    Events lack ``sequence_number``, which the stream adds. ``logprob`` returns the log-probability
    entry of a content token.
    """

    def __init__(self, logprob: Callable[[TokenEvent], dict[str, Any]]) -> None:
        self._logprob = logprob
        self._items: list[Item] = []
        self._open_type: str | None = None
        # Text or arguments that are not appended to the open item yet. Appending each token would
        # copy the string each time.
        self._pieces: list[str] = []

    @property
    def items(self) -> list[Item]:
        """The items so far. It is always the same list."""
        if self._pieces:
            item = self._items[-1]
            part, name = (
                (item, "arguments")
                if self._open_type == "function_call"
                else (item["content"][0], "text")
            )
            part[name] += "".join(self._pieces)
            self._pieces.clear()
        return self._items

    def add(self, deltas: Sequence[Delta]) -> Iterator[ResponseEvent]:
        """Yield the events of further deltas."""
        for delta in deltas:
            if delta.tool is not None and delta.name is not None:
                yield from self._begin("function_call", _function_call(delta))
            elif delta.tool is not None:
                yield from self._extend("arguments", delta.arguments)
            elif delta.reasoning:
                if self._open_type != "reasoning":
                    yield from self._begin("reasoning", _reasoning())
                yield from self._extend("reasoning_text", delta.reasoning)
            elif delta.content:
                if self._open_type != "message":
                    yield from self._begin("message", _message())
                yield from self._extend("output_text", delta.content, delta.tokens)

    def close(self, status: str) -> Iterator[ResponseEvent]:
        """Yield the final events of the open item, whose ``status`` is ``completed`` or
        ``incomplete``.
        """
        item_type = self._open_type
        if item_type is None:
            return
        item = self.items[-1]
        self._open_type = None
        if item_type == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        else:
            name = "reasoning_text" if item_type == "reasoning" else "output_text"
            part = item["content"][0]
            fields: dict[str, Any] = {}
            if item_type == "message":
                fields["logprobs"] = part["logprobs"]
            yield self._event(f"{name}.done", content_index=0, text=part["text"], **fields)
            yield self._event("content_part.done", content_index=0, part=_copy_part(part))
        item["status"] = status
        yield self._event("output_item.done", with_item=True)

    def _begin(self, item_type: str, item: Item) -> Iterator[ResponseEvent]:
        yield from self.close("completed")
        self._items.append(item)
        self._open_type = item_type
        yield self._event("output_item.added", with_item=True)
        if item_type != "function_call":
            part = _part("reasoning_text" if item_type == "reasoning" else "output_text")
            item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=_copy_part(part))

    def _extend(
        self, name: str, text: str, tokens: Sequence[TokenEvent] = ()
    ) -> Iterator[ResponseEvent]:
        if not text:
            return
        self._pieces.append(text)
        if name == "arguments":
            yield self._event("function_call_arguments.delta", delta=text)
            return
        fields: dict[str, Any] = {}
        if name == "output_text":
            fields["logprobs"] = [self._logprob(token) for token in tokens]
            self._items[-1]["content"][0]["logprobs"] += fields["logprobs"]
        yield self._event(f"{name}.delta", content_index=0, delta=text, **fields)

    def _event(self, name: str, *, with_item: bool = False, **fields: Any) -> ResponseEvent:
        item = self._items[-1]
        item_fields: dict[str, Any] = (
            {"item": _copy_item(item)} if with_item else {"item_id": item["id"]}
        )
        return {
            "type": f"response.{name}",
            "output_index": len(self._items) - 1,
            **item_fields,
            **fields,
        }


def _copy_item(item: Item) -> Item:
    """Return a copy of an item, because later deltas extend the item itself."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [_copy_part(part) for part in item["content"]]}


def _copy_part(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "logprobs": [*part["logprobs"]]} if "logprobs" in part else dict(part)


def _message() -> Item:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> Item:
    return {
        "id": f"rs_{uuid.uuid4().hex}",
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [],
    }


def _function_call(delta: Delta) -> Item:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": delta.call_id or f"call_{uuid.uuid4().hex[:24]}",
        "name": delta.name,
        "arguments": "",
    }


def _part(name: str) -> dict[str, Any]:
    if name == "reasoning_text":
        return {"type": name, "text": ""}
    return {"type": name, "text": "", "annotations": [], "logprobs": []}
