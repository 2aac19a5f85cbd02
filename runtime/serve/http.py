"""Endpoints with a JSON body that return JSON or server-sent events.

If the client disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.event_stream import EventStream, event_bytes, json_bytes
from specbuild.runtime.serve.fields import first_error
from specbuild.runtime.serve.request_fields import RequestFields
from specbuild.runtime.serve.request_record import SEND_BODY

MAX_BODY_BYTES = 32 << 20
# These limits bound the memory of a parsed body: up to 40 bytes for each number, 100 for each list
# or object, and 1000 for each error of pydantic.
MAX_BODY_VALUES = 1 << 20
MAX_BODY_PARTS = 1 << 17
# Time in which a client must send its body.
BODY_TIMEOUT_S = 60.0

# Key of a scope: the server's connection as a ``DirectBody``.
DIRECT_BODY = "specbuild.direct_body"

Answer: TypeAlias = Mapping[str, Any] | EventStream
Body = TypeVar("Body", bound=RequestFields)


class Endpoint(Generic[Body]):
    """A route with a JSON body: ``handle`` returns the answer, or a stream.

    The stream is closed when the client disconnects. An ApiError of ``handle`` becomes the answer;
    in a stream that has started it becomes the last event.
    """

    def __init__(
        self,
        model: type[Body],
        handle: Callable[[Body], Awaitable[Mapping[str, Any] | EventStream]],
    ) -> None:
        self._model = model
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            check_media_type(scope)
            body = self._parse(await read_body(scope, receive))
        except ApiError as error:
            await send_error(send, error, self._model.error_body(error))
            return
        answer = asyncio.create_task(self._answer(body, scope, send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not answer.done():
                answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer

    def _parse(self, body: bytes) -> Body:
        check_structure(body)
        try:
            fields = self._model.model_validate_json(body)
        except ValidationError as error:
            raise first_error(error.errors(include_url=False)) from error
        except ValueError as error:
            # Python refuses to parse integers with thousands of digits.
            raise ApiError(400, f"the body cannot be parsed as JSON: {error}") from error
        fields.refuse_unsupported()
        return fields

    async def _answer(self, body: Body, scope: Scope, send: Send) -> None:
        try:
            answer = await self._handle(body)
            if isinstance(answer, Mapping):
                await send_json(send, answer)
            else:
                async with aclosing(answer.batches):
                    await _send_events(scope, send, answer, self._model.error_body)
        except ApiError as error:
            await send_error(send, error, self._model.error_body(error))


def check_media_type(scope: Scope) -> None:
    """Raise ApiError unless the body is declared as JSON.

    Browsers send other types for pages of other origins without a preflight request.
    """
    content_type = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0]
    if content_type.strip().lower() != b"application/json":
        media_type = content_type.strip().decode("latin-1")
        message = (
            f"the content type is {media_type or 'missing'}, must be application/json; send the "
            "header Content-Type: application/json"
        )
        raise ApiError(415, message, code="unsupported_media_type")


def check_structure(body: bytes) -> None:
    """Raise ApiError if a JSON text has too many values, or too many lists, objects and names."""
    if not _exceeds_structure(body):
        return
    # Strings may contain any number of these characters, so count again without the strings.
    parts = body.replace(rb"\\", b"").replace(rb"\"", b"")
    too_many_texts = parts.count(b'"') > 2 * MAX_BODY_VALUES
    if too_many_texts or _exceeds_structure(b"".join(parts.split(b'"')[::2])):
        raise ApiError(
            400,
            f"the body has more than {MAX_BODY_VALUES} values, or more than {MAX_BODY_PARTS} lists "
            "and objects or names in them; split it into several requests",
        )


def _exceeds_structure(text: bytes) -> bool:
    parts = max(text.count(b"[") + text.count(b"{"), text.count(b":"))
    return parts > MAX_BODY_PARTS or text.count(b",") > MAX_BODY_VALUES


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body of a request. ApiError if it is too long or arrives too slowly."""
    content_length = dict(scope["headers"]).get(b"content-length", b"0")
    if content_length.isdigit() and int(content_length) > MAX_BODY_BYTES:
        raise _too_long_error()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client disconnected before its request was complete")
                part = message.get("body", b"")
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_long_error()
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds") from error


async def send_json(
    send: Send,
    answer: Mapping[str, Any],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a complete JSON answer."""
    body = json_bytes(answer)
    all_headers = {"content-type": "application/json", "content-length": str(len(body))}
    await send(_start_message(status, all_headers | dict(headers or {})))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, body: Mapping[str, Any] | None = None) -> None:
    """Send an error, by default in OpenAI's form."""
    # The rest of a body that is too long or late is not read, so the connection must close.
    headers = error.headers | ({"connection": "close"} if error.status in (408, 413) else {})
    await send_json(send, body or error.body, error.status, headers)


async def _send_events(
    scope: Scope, send: Send, stream: EventStream, error_body: Callable[[ApiError], dict[str, Any]]
) -> None:
    """Send the events of a stream. The status is sent with the first of them, or with an error."""
    send_body, direct, started = scope.get(SEND_BODY, send), scope.get(DIRECT_BODY), False
    has_types = stream.source.has_types
    try:
        async with aclosing(stream.events()) as events:
            async for data in events:
                if not data:
                    continue
                if not started:
                    await send(_start_message(200, _STREAM_HEADERS))
                    started = True
                    if direct is not None:
                        stream.write_directly(direct)
                await send_body(_body_part(data))
    except ApiError as error:
        if not started:
            raise
        body = error_body(error)
        if has_types and "type" not in body:
            body = {"type": "error", **body["error"]}
        await send_body(_body_part(event_bytes(body)))
    await send_body(
        {"type": "http.response.body", "body": b"" if has_types else b"data: [DONE]\n\n"}
    )


_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def _body_part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _start_message(status: int, headers: Mapping[str, str]) -> Message:
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_long_error() -> ApiError:
    return ApiError(413, f"the body is longer than {MAX_BODY_BYTES >> 20} MiB")
