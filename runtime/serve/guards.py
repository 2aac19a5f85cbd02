"""ASGI layers around all routes: keys, and nothing but a sentence where a route fails."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import send_error

# What is asked of a server by those who watch it, which have no key.
_OPEN_PATHS = (
    "/",
    "/favicon.ico",
    "/health",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/version",
)
_OPEN_FOLDER = "/page/"
log = logging.getLogger("specbuild.serve")


class Keys:
    """Lets pass who sends one of the keys as ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves or refuses one request."""
        if scope["type"] != "http" or not self._digests or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time: an answer's time tells nothing of them.
        known = [hmac.compare_digest(digest, held) for held in self._digests]
        if kind.lower() == b"bearer" and any(known):
            await self._app(scope, receive, send)
        else:
            refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await send_error(send, refusal)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _client_left(error: Exception) -> bool:
    """Whether this is uvloop's word for a closed connection.

    uvicorn writes to one where a client sent a second request behind the first, and left.
    """
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


class Failures:
    """Answers what a route could not: an ApiError's object, or 500 where the fault is ours.

    ``log_requests`` gives a line for each request.
    """

    def __init__(self, app: ASGIApp, log_requests: bool = False) -> None:
        self._app = app
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ApiError as error:
            if not status:
                await send_error(noted, error)
        except Exception as error:
            if _client_left(error):
                return
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await send_error(noted, ApiError(500, "internal error; the server's log has it"))
        finally:
            if self._log_requests:
                passed_ms = 1e3 * (time.monotonic() - started_s)
                client = scope.get("client") or ("-", 0)
                log.info(
                    '%s "%s %s" %d %.1f ms',
                    client[0],
                    scope["method"],
                    scope["path"],
                    status,
                    passed_ms,
                )
