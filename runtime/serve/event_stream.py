"""Server-sent events of a generation, made from its tokens without waiting."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, ClassVar, Protocol

from pydantic_core import to_json

from specbuild.runtime.request import Event, TokenEvent
from specbuild.runtime.serve.token_batches import TokenBatch, TokenBatches


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON. Numbers that are not finite, which clients may send, become null."""
    return to_json(value, inf_nan_mode="null")


def event_bytes(chunk: Mapping[str, Any]) -> bytes:
    """Return a server-sent event. A chunk with a ``type`` is an event of that name."""
    event_type = chunk.get("type")
    event_line = f"event: {event_type}\n".encode() if event_type is not None else b""
    return b"%bdata: %b\n\n" % (event_line, json_bytes(chunk))


class TextEvent:
    """The event of a chunk that differs from others in its text only.

    ``chunk_of`` returns the chunk with a text, which may occur in it several times.
    """

    def __init__(self, chunk_of: Callable[[str], Mapping[str, Any]]) -> None:
        # No client can guess it, so no other field of the chunk contains it.
        mark = secrets.token_hex(16)
        self._parts = event_bytes(chunk_of(mark)).split(json_bytes(mark))

    def with_text(self, text: str) -> bytes:
        """Return the event with this text."""
        return encode_basestring(text).encode().join(self._parts)


class DirectBody(Protocol):
    """Writes parts of an answer's body at once, after its headers."""

    def is_ready(self) -> bool:
        """Whether the client reads, so that a part can be written now."""
        ...

    def write(self, data: bytes) -> None:
        """Write a part."""
        ...


class EventSource(ABC):
    """Makes the chunks of a stream. The choices of a call share it."""

    # Whether its chunks have a ``type``. A stream without types ends with ``[DONE]``.
    has_types: ClassVar[bool] = False

    @property
    def has_ended(self) -> bool:
        """Whether later tokens are not needed, because a stop string ended each output."""
        return False

    @abstractmethod
    def begin(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks before the first token."""

    @abstractmethod
    def add(self, batch: TokenBatch) -> Iterable[Mapping[str, Any]]:
        """Return the chunks of a batch."""

    @abstractmethod
    def end(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks after the last token."""

    def encoded(self, batch: TokenBatch) -> bytes:
        """Return the events of a batch."""
        return b"".join(map(event_bytes, self.add(batch)))

    def encoded_token(self, token: TokenEvent) -> bytes:
        """Return the events of a token that does not end its output."""
        return self.encoded(TokenBatch(token.request, [token]))


@dataclass(frozen=True)
class EventStream:
    """The tokens of a call, and the source that makes events of them.

    Whoever receives it closes ``batches`` at the end, which aborts unfinished requests.
    """

    batches: TokenBatches
    source: EventSource

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Iterate over all chunks, and close the stream."""
        async with aclosing(self.batches):
            for chunk in self.source.begin():
                yield chunk
            async for batch in self.batches:
                for chunk in self.source.add(batch):
                    yield chunk
                if self.source.has_ended:
                    break
        for chunk in self.source.end():
            yield chunk

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Iterate over the events of one engine step after the other, and close the stream."""
        source = self.source
        async with aclosing(self.batches):
            yield b"".join(map(event_bytes, source.begin()))
            async for step in self.batches.steps():
                yield self._encoded(step)
                if source.has_ended:
                    break
        yield b"".join(map(event_bytes, source.end()))

    def write_directly(self, body: DirectBody) -> None:
        """Write events when their tokens arrive, instead of at the next turn of the reader.

        This applies while the reader of :meth:`events` waits for tokens and the client reads. The
        last tokens of a request are always left to the reader.
        """
        source, batches = self.source, self.batches

        def receive(events: list[Event]) -> bool | None:
            if not body.is_ready():
                return None
            first = events[0]
            if len(events) == 1 and isinstance(first, TokenEvent):
                # Nearly all steps of a request without a draft.
                body.write(source.encoded_token(first))
            else:
                body.write(self._encoded(batches.step_of(events)))
            return not source.has_ended

        batches.receive_directly(receive)

    def _encoded(self, step: Sequence[TokenBatch]) -> bytes:
        source = self.source
        if len(step) == 1:
            return source.encoded(step[0])
        parts = []
        for batch in step:
            parts.append(source.encoded(batch))
            if source.has_ended:
                break
        return b"".join(parts)
