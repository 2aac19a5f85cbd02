"""HTTP connections with limits for slow clients and long headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import BODY_TIMEOUT_S, DIRECT_BODY
from specbuild.runtime.serve.request_record import REQUEST_ID_HEADER, new_request_id

# Time for the request line and headers. It starts with the connection, or with the first byte of a
# later request.
HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10
# The extra time lets the route answer with 408 before the connection is closed.
BODY_GRACE_S = 5.0
# Idle time between two requests, longer than that of common clients and proxies.
KEEP_ALIVE_S = 75
# Time in which a client must read data when the socket's buffers are full.
WRITE_TIMEOUT_S = 60.0


class _CycleBody:
    """The body of an answer in chunks, after its headers (a :class:`DirectBody`)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def is_ready(self) -> bool:
        """Whether the client reads."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, data: bytes) -> None:
        """Write a chunk. An empty one would end the body."""
        if data:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits of time and size, which uvicorn itself lacks.

    Headers that are late or too long get 408 or 431. The connection is closed if it stays silent,
    if a body is late or if the client does not read the answer.
    """

    # The running timeouts, and the size of the headers so far.
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the headers of the first request."""
        super().connection_made(transport)
        self._set_timeout(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timeouts."""
        self._set_timeout(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of incomplete headers."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject(431, f"the headers have more than {MAX_HEAD_BYTES >> 10} KiB")
        elif self._read_timer is None and self.timeout_keep_alive_task is None and self._is_idle:
            # Line ends between two requests stop uvicorn's timer without starting a request.
            self._set_timeout(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """Start to read the headers of a request."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self._read_timer is None:
            self._set_timeout(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Start the timeout for the body."""
        self._is_in_head = False
        self._set_timeout(BODY_TIMEOUT_S + BODY_GRACE_S)
        super().on_headers_complete()
        if self.cycle is not None:
            scope: MutableMapping[str, Any] = cast(Any, self.cycle.scope)
            scope[DIRECT_BODY] = _CycleBody(self.cycle)

    def on_message_complete(self) -> None:
        """Cancel the timeout: the request is complete."""
        self._set_timeout(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timeout for a client that does not read."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the write timeout: the client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        self._reject(400, msg)

    @property
    def _is_idle(self) -> bool:
        """Whether the last request has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def _set_timeout(self, seconds: float | None) -> None:
        """Replace the timeout for the rest of the headers or body. None cancels it."""
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = (
            None if seconds is None else self.loop.call_later(seconds, self._on_timeout)
        )

    def _on_timeout(self) -> None:
        if self._is_in_head:
            self._reject(408, f"the headers did not arrive within {HEAD_TIMEOUT_S:g} seconds")
        else:
            self.transport.abort()

    def _reject(self, status: int, message: str) -> None:
        """Send an error before a route is called, and close the connection.

        If an answer is pending, only close the connection.
        """
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
