"""Deltas of an output as the items of a response, and as the events that a stream tells of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.parsers.parser import Delta

Item = dict[str, Any]
ResponseEvent = dict[str, Any]


class Items:
    """The items of one response, in the order in which the model wrote them.

    Events lack their ``sequence_number``, which counts those of the whole stream. ``logprob`` is
    what is said of a token of content.
    """

    def __init__(self, logprob: Callable[[TokenEvent], dict[str, Any]]) -> None:
        self._logprob = logprob
        self.items: list[Item] = []
        self._open: str | None = None

    def take(self, deltas: Sequence[Delta]) -> Iterator[ResponseEvent]:
        """The events of more deltas."""
        for delta in deltas:
            if delta.tool is not None and delta.name is not None:
                yield from self._begin("function_call", _function_call(delta.name))
            elif delta.tool is not None:
                yield from self._more("arguments", delta.arguments)
            elif delta.reasoning:
                if self._open != "reasoning":
                    yield from self._begin("reasoning", _reasoning())
                yield from self._more("reasoning_text", delta.reasoning)
            elif delta.content:
                if self._open != "message":
                    yield from self._begin("message", _message())
                yield from self._more("output_text", delta.content, delta.tokens)

    def close(self, status: str) -> Iterator[ResponseEvent]:
        """The output ends: the open item is ``completed`` or ``incomplete``."""
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.items[-1]
        if kind == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        else:
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            part = item["content"][0]
            about: dict[str, Any] = {}
            if kind == "message":
                about["logprobs"] = part["logprobs"]
            yield self._event(f"{name}.done", content_index=0, text=part["text"], **about)
            yield self._event("content_part.done", content_index=0, part=dict(part))
        item["status"] = status
        yield self._event("output_item.done", whole=True)

    def _begin(self, kind: str, item: Item) -> Iterator[ResponseEvent]:
        yield from self.close("completed")
        self.items.append(item)
        self._open = kind
        yield self._event("output_item.added", whole=True)
        if kind != "function_call":
            part = _part("reasoning_text" if kind == "reasoning" else "output_text")
            item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=dict(part))

    def _more(
        self, name: str, text: str, tokens: Sequence[TokenEvent] = ()
    ) -> Iterator[ResponseEvent]:
        if not text:
            return
        item = self.items[-1]
        if name == "arguments":
            item["arguments"] += text
            yield self._event("function_call_arguments.delta", delta=text)
            return
        about: dict[str, Any] = {}
        part = item["content"][0]
        part["text"] += text
        if name == "output_text":
            about["logprobs"] = [self._logprob(token) for token in tokens]
            part["logprobs"] = part["logprobs"] + about["logprobs"]
        yield self._event(f"{name}.delta", content_index=0, delta=text, **about)

    def _event(self, name: str, *, whole: bool = False, **fields: Any) -> ResponseEvent:
        item = self.items[-1]
        about: dict[str, Any] = {"item": _copied(item)} if whole else {"item_id": item["id"]}
        return {
            "type": f"response.{name}",
            "output_index": len(self.items) - 1,
            **about,
            **fields,
        }


def _copied(item: Item) -> Item:
    """The item as it is now: it goes on growing."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}


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


def _function_call(name: str) -> Item:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": f"call_{uuid.uuid4().hex[:24]}",
        "name": name,
        "arguments": "",
    }


def _part(name: str) -> dict[str, Any]:
    if name == "reasoning_text":
        return {"type": name, "text": ""}
    return {"type": name, "text": "", "annotations": [], "logprobs": []}
