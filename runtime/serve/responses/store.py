"""Answers that can be asked for again: so many, for so long."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.responses.items import Items

MOST_ANSWERS = 1000
LONGEST_S = 3600.0


@dataclass
class Stored:
    """An answer, the messages that led to it and are its own, and the task that makes it.

    ``items`` are those of an answer that is being made.
    """

    answer: dict[str, Any]
    messages: Sequence[Mapping[str, Any]]
    stored_s: float
    task: asyncio.Task[None] | None = None
    items: Items | None = None

    def shown(self) -> dict[str, Any]:
        """The answer as it is now."""
        if self.items is not None:
            self.answer["output"] = self.items.items
        return self.answer


class ResponseStore:
    """Answers by id. The oldest go when there are too many, or they are too old."""

    def __init__(self, *, most: int = MOST_ANSWERS, longest_s: float = LONGEST_S) -> None:
        self._most = most
        self._longest_s = longest_s
        self._held: OrderedDict[str, Stored] = OrderedDict()

    def put(self, answer: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> Stored:
        """Keeps an answer, or what became of it."""
        self._drop_old()
        stored = self._held.get(answer["id"]) or Stored(answer, messages, time.monotonic())
        stored.answer, stored.messages = answer, messages
        self._held[answer["id"]] = stored
        while len(self._held) > self._most:
            self._held.popitem(last=False)
        return stored

    def get(self, name: str) -> Stored:
        """ApiError where there is none, or none any more."""
        self._drop_old()
        if name not in self._held:
            raise ApiError(
                404,
                f"there is no response {name!r}: the last {self._most} are kept, "
                f"for {self._longest_s / 60:g} minutes",
                param="response_id",
            )
        return self._held[name]

    def delete(self, name: str) -> None:
        """Forgets an answer. ApiError where there is none."""
        self.get(name)
        del self._held[name]

    def _drop_old(self) -> None:
        oldest_s = time.monotonic() - self._longest_s
        while self._held and next(iter(self._held.values())).stored_s < oldest_s:
            self._held.popitem(last=False)
