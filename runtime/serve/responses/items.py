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
        self._items: list[Item] = []
        self._open: str | None = None
        # Of the open item's text or arguments: what it does not hold yet. To lengthen a string by
        # each token would copy it each time.
        self._pieces: list[str] = []

    @property
    def items(self) -> list[Item]:
        """The items with all that came so far: always the same list."""
        if self._pieces:
            item = self._items[-1]
            part, name = (
                (item, "arguments")
                if self._open == "function_call"
                else (item["content"][0], "text")
            )
            part[name] += "".join(self._pieces)
            self._pieces.clear()
        return self._items

    def take(self, deltas: Sequence[Delta]) -> Iterator[ResponseEvent]:
        """The events of more deltas."""
        for delta in deltas:
            if delta.tool is not None and delta.name is not None:
                yield from self._begin("function_call", _function_call(delta))
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
        kind = self._open
        if kind is None:
            return
        item = self.items[-1]
        self._open = None
        if kind == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        else:
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            part = item["content"][0]
            about: dict[str, Any] = {}
            if kind == "message":
                about["logprobs"] = part["logprobs"]
            yield self._event(f"{name}.done", content_index=0, text=part["text"], **about)
            yield self._event("content_part.done", content_index=0, part=_part_now(part))
        item["status"] = status
        yield self._event("output_item.done", whole=True)

    def _begin(self, kind: str, item: Item) -> Iterator[ResponseEvent]:
        yield from self.close("completed")
        self._items.append(item)
        self._open = kind
        yield self._event("output_item.added", whole=True)
        if kind != "function_call":
            part = _part("reasoning_text" if kind == "reasoning" else "output_text")
            item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=_part_now(part))

    def _more(
        self, name: str, text: str, tokens: Sequence[TokenEvent] = ()
    ) -> Iterator[ResponseEvent]:
        if not text:
            return
        self._pieces.append(text)
        if name == "arguments":
            yield self._event("function_call_arguments.delta", delta=text)
            return
        about: dict[str, Any] = {}
        if name == "output_text":
            about["logprobs"] = [self._logprob(token) for token in tokens]
            self._items[-1]["content"][0]["logprobs"] += about["logprobs"]
        yield self._event(f"{name}.delta", content_index=0, delta=text, **about)

    def _event(self, name: str, *, whole: bool = False, **fields: Any) -> ResponseEvent:
        item = self._items[-1]
        about: dict[str, Any] = {"item": _copied(item)} if whole else {"item_id": item["id"]}
        return {
            "type": f"response.{name}",
            "output_index": len(self._items) - 1,
            **about,
            **fields,
        }


def _copied(item: Item) -> Item:
    """The item as it is now: it goes on growing."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [_part_now(part) for part in item["content"]]}


def _part_now(part: dict[str, Any]) -> dict[str, Any]:
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
