"""ASGI layers around all routes: hosts, keys, and one sentence where a route fails."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import send_error

log = logging.getLogger("specbuild.serve")


class KeyCheck:
    """Accepts requests with one of the keys as ``Authorization: Bearer KEY``.

    Paths for which ``needs_key`` is False are served without one, and all without ``keys``.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], needs_key: Callable[[str], bool]) -> None:
        self._app = app
        self._needs_key = needs_key
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves or refuses one request."""
        if scope["type"] != "http" or not self._digests or not self._needs_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time: an answer's time tells nothing of them.
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await send_error(send, error)


def _is_disconnect(error: Exception) -> bool:
    """Whether this is uvloop's word for a closed connection.

    uvicorn writes to one where a client sent a second request behind the first, and left.
    """
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


class HostCheck:
    """Refuses requests whose ``Host`` names another host than ``allowed``; ``*`` allows any.

    A page of another site that rebinds its own name to this address could read the answers.
    Ports are not compared.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {_normal_host(host) for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and "*" not in self._allowed:
            headers = [
                value.decode("latin-1") for name, value in scope["headers"] if name == b"host"
            ]
            hosts = [_host_of(value) for value in headers] or [""]
            unknown = next((host for host in hosts if host not in self._allowed), None)
            if unknown is not None:
                message = (
                    f"the Host header names {unknown!r}, this server answers to "
                    f"{', '.join(sorted(self._allowed))}; add others with --allowed-hosts"
                )
                await send_error(send, ApiError(403, message, code="host_not_allowed"))
                return
        await self._app(scope, receive, send)


def _host_of(header: str) -> str:
    """The host of a ``Host`` header, without its port."""
    text = header.strip()
    if text.startswith("["):
        return _normal_host(text.partition("]")[0] + "]")
    return _normal_host(text.partition(":")[0])


def _normal_host(host: str) -> str:
    """A host in lower case; IPv6 addresses have brackets, as in a header."""
    host = host.lower().removesuffix(".")
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class ErrorHandler:
    """Answers what a route raised: an ApiError's object, or 500 for an internal fault."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ApiError as error:
            if not started:
                await send_error(send_and_note, error)
        except Exception as error:
            if _is_disconnect(error):
                return
            # A path may hold line ends.
            log.exception("%s %.200r failed", scope["method"], scope["path"])
            if not started:
                await send_error(
                    send_and_note, ApiError(500, "internal error; the server's log has it")
                )
