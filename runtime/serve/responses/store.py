"""Storage of finished responses, limited in number, age and bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.event_stream import json_bytes

MAX_RESPONSES = 1000
MAX_AGE_S = 3600.0
# The limit for one response: its answer and the messages of its conversation.
MAX_RESPONSE_BYTES = 16 << 20
MAX_STORED_BYTES = 256 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A finished response as JSON text, so that its size in memory is known.

    ``conversation`` is the list of messages that a following response continues. ``inputs`` are the
    input's items.
    """

    answer: bytes
    conversation: bytes
    stored_s: float
    inputs: bytes = b"[]"

    @property
    def size(self) -> int:
        """The number of bytes of all texts."""
        return len(self.answer) + len(self.conversation) + len(self.inputs)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the conversation, including the response."""
        messages: list[dict[str, Any]] = from_json(self.conversation)
        return messages

    @property
    def is_background(self) -> bool:
        """Whether the response was created in the background."""
        return bool(from_json(self.answer)["background"])


class ResponseStore:
    """Stored responses by id. The oldest are evicted if there are too many, or too many bytes."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_age_s: float = MAX_AGE_S,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_age_s = max_age_s
        self._max_response_bytes = max_response_bytes
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.stored_bytes = 0

    def check(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Raise ApiError if a request alone exceeds the limit of a stored response."""
        size = sum(len(json_bytes(part)) for part in (answer, messages, inputs))
        if size > self._max_response_bytes:
            raise ApiError(
                400,
                f"the response would store {size} bytes of its request, at most "
                f"{self._max_response_bytes} are stored; shorten the request or set store to false",
                param="store",
                code="response_too_large",
            )

    def put(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Store a finished response. Return False, and store nothing, if it is too large."""
        self._evict_expired()
        response = StoredResponse(
            json_bytes(answer), json_bytes(messages), time.monotonic(), json_bytes(inputs)
        )
        if response.size > self._max_response_bytes:
            return False
        self._responses[answer["id"]] = response
        self.stored_bytes += response.size
        while len(self._responses) > self._max_responses or self.stored_bytes > self._max_bytes:
            self._evict_oldest()
        return True

    def get(self, name: str) -> StoredResponse:
        """Return a response. ApiError if it is not stored or has been evicted."""
        self._evict_expired()
        if name not in self._responses:
            raise ApiError(
                404,
                f"there is no response {name[:100]!r}: the last {self._max_responses} are stored "
                f"for {self._max_age_s / 60:g} minutes, in at most {self._max_bytes >> 20} MiB",
                param="response_id",
            )
        return self._responses[name]

    def delete(self, name: str) -> None:
        """Delete a response. ApiError if it is not stored."""
        self.stored_bytes -= self.get(name).size
        del self._responses[name]

    def _evict_expired(self) -> None:
        oldest_s = time.monotonic() - self._max_age_s
        while self._responses and next(iter(self._responses.values())).stored_s < oldest_s:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, response = self._responses.popitem(last=False)
        self.stored_bytes -= response.size
