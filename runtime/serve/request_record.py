"""An id, a log line and a count for each HTTP request."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbuild.runtime.request import Request

REQUEST_ID_HEADER = "x-request-id"
# Key of a scope: the server's own ``send``. Middleware changes only the start of an answer, so
# events need not pass through it: each layer costs as much as the JSON of an event.
SEND_BODY = "specbuild.send_body"
# Characters of HTTP tokens and of other servers' ids. None of them ends a field of a log line.
_VALID_ID = re.compile(rb"[A-Za-z0-9!#$%&'*+\-.^_`|~:/=@]{1,128}")
_MAX_LOGGED_PATH = 200
# nginx's status for a client that disconnected before the answer.
CLIENT_LEFT = 499
# Called with the method, handler, status and seconds of each answered request.
CountRequest = Callable[[str, str, int, float], None]


def new_request_id() -> str:
    """Return a random request id."""
    return secrets.token_hex(16)


@dataclass
class RequestRecord:
    """The log record of one HTTP request. Token counts are None if it did not generate."""

    id: str
    status: int = CLIENT_LEFT
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)

    def count_prompts(self, requests: Sequence[Request]) -> None:
        """Count the prompt tokens. The choices of a prompt share one tuple of ids."""
        prompts = {id(request.prompt_ids): len(request.prompt_ids) for request in requests}
        self.prompt_tokens = (self.prompt_tokens or 0) + sum(prompts.values())
        self.output_tokens = self.output_tokens or 0

    def count_tokens(self, tokens: int) -> None:
        """Count the tokens of one engine step."""
        if tokens and self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.output_tokens = (self.output_tokens or 0) + tokens

    @property
    def duration_s(self) -> float:
        """The time since the request arrived."""
        return time.monotonic() - self.started_s

    def values(self, scope: Scope, handler: str) -> dict[str, str | int | float | None]:
        """Return the values of the log line of the finished request, by name."""
        client = scope.get("client")
        route = handler
        if handler == UNKNOWN_HANDLER:
            route = quote(scope["path"], safe="/:~@!$&'()*+,;=")[:_MAX_LOGGED_PATH] or "-"
        ttft_s = None if self.first_token_s is None else self.first_token_s - self.started_s
        return {
            "request_id": self.id,
            "client": f"{quote(str(client[0]), safe=':.')}:{client[1]}" if client else None,
            "method": quote(scope["method"]),
            "route": route,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": _milliseconds(ttft_s),
            "duration_ms": _milliseconds(self.duration_s),
        }

    def line(self, scope: Scope, handler: str, *, as_json: bool = False) -> str:
        """Return the log line of the finished request. No value in it can contain a line end."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        values = self.values(scope, handler)
        if as_json:
            return json.dumps({"time": now, **values})
        fields = (f"{name}={'-' if v is None else v}" for name, v in values.items())
        return " ".join([now, *fields])


# All unknown paths share this handler name, so that clients cannot create labels of metrics.
UNKNOWN_HANDLER = "none"
_RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord | None:
    """Return the record of the HTTP request that is being served; None outside of a request."""
    return _RECORD.get()


class RequestRecords:
    """ASGI middleware that gives each response an ``x-request-id``, counts it and logs it.

    A valid id of the client is kept. With ``log`` a line is written to standard error, with
    ``as_json`` as an object of JSON.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[Route],
        count: CountRequest,
        log: bool,
        as_json: bool = False,
    ) -> None:
        self._app = app
        self._paths = {id(route.endpoint): route.path for route in routes}
        self._count = count
        self._log = log
        self._as_json = as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        _RECORD.set(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                header = (REQUEST_ID_HEADER.encode(), record.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            scope[SEND_BODY] = send
            await self._app(scope, receive, send_with_id)
        finally:
            handler = self._paths.get(id(scope.get("endpoint")), UNKNOWN_HANDLER)
            self._count(scope["method"], handler, record.status, record.duration_s)
            if self._log and sys.stderr is not None:
                # A closed standard error must not fail the request.
                with suppress(OSError, ValueError):
                    line = record.line(scope, handler, as_json=self._as_json)
                    print(line, file=sys.stderr, flush=True)


def _request_id(scope: Scope) -> str:
    client_id = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"")
    return client_id.decode("ascii") if _VALID_ID.fullmatch(client_id) else new_request_id()


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
