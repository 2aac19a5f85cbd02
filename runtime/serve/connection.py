"""One HTTP connection: who sends or reads too slowly, or too long a head, loses it."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import BODY_TIMEOUT_S
from specbuild.runtime.serve.request_record import REQUEST_ID_HEADER, new_request_id

# From the connection, or the first byte of a later request, to the end of the head.
HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10
# Routes that read their body answer first.
BODY_GRACE_S = 5.0
# How long a connection between two requests is kept: longer than clients and proxies keep theirs.
KEEP_ALIVE_S = 75
# How long a client may leave what was sent to it in the socket's buffers.
WRITE_TIMEOUT_S = 60.0


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which waits for requests for ever, with limits of time and size.

    A head that is late or too long is answered with 408 or 431; a connection on which nothing came,
    whose body is late or whose answer nobody reads is closed.
    """

    # What closes the connection, and what it waits for.
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head of the first request is to come."""
        super().connection_made(transport)
        self._set_timeout(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._set_timeout(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to a head that has not ended."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject(431, f"the head has over {MAX_HEAD_BYTES >> 10} KiB")
        elif self._read_timer is None and self.timeout_keep_alive_task is None and self._is_idle:
            # Line ends between two requests stop uvicorn's timer and begin no request.
            self._set_timeout(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self._read_timer is None:
            self._set_timeout(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Its body is to come."""
        self._is_in_head = False
        self._set_timeout(BODY_TIMEOUT_S + BODY_GRACE_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It is there as a whole."""
        self._set_timeout(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client has not read what fills the buffers."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._reject(400, msg)

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _set_timeout(self, seconds: float | None) -> None:
        """The next part of a request has so long; None: nothing is to come."""
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = (
            None if seconds is None else self.loop.call_later(seconds, self._on_timeout)
        )

    def _on_timeout(self) -> None:
        if self._is_in_head:
            self._reject(408, f"the head did not come within {HEAD_TIMEOUT_S:g} seconds")
        else:
            self.transport.abort()

    def _reject(self, status: int, message: str) -> None:
        """Answers where no route can, and closes. Behind a request without its answer, closes."""
        if not self._is_idle:
            self.transport.abort()
            return
        body = json.dumps(ApiError(status, message).body).encode()
        headers: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": len(body),
            REQUEST_ID_HEADER: new_request_id(),
        }
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        self.transport.close()
