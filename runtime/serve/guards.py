"""ASGI middleware around all routes: host check, key check and error responses."""

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
    """Accepts requests with one of the keys as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    Paths for which ``needs_key`` returns False need no key. Without ``keys`` no path needs one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], needs_key: Callable[[str], bool]) -> None:
        self._app = app
        self._needs_key = needs_key
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        if scope["type"] != "http" or not self._digests or not self._needs_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not key:
            # Anthropic's header.
            scheme, key = b"bearer", headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # Compare all keys in constant time, so that response times reveal nothing about them.
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await send_error(send, error)


def _is_disconnect(error: Exception) -> bool:
    """Return whether uvloop raised this because the connection was closed.

    uvicorn writes to a closed connection if a client pipelined a second request and left.
    """
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


class HostCheck:
    """Rejects requests whose ``Host`` header is not in ``allowed``; ``*`` allows any host.

    This prevents DNS rebinding: another site could point its own name to this address and read the
    answers. Ports are not compared.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {_normal_host(host) for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        if scope["type"] == "http" and "*" not in self._allowed:
            headers = [
                value.decode("latin-1") for name, value in scope["headers"] if name == b"host"
            ]
            hosts = [_host_of(value) for value in headers] or [""]
            unknown = next((host for host in hosts if host not in self._allowed), None)
            if unknown is not None:
                message = (
                    f"the Host header is {unknown!r}, but this server accepts "
                    f"{', '.join(sorted(self._allowed))}; add others with --allowed-hosts"
                )
                await send_error(send, ApiError(403, message, code="host_not_allowed"))
                return
        await self._app(scope, receive, send)


def _host_of(header: str) -> str:
    """Return the host of a ``Host`` header, without its port."""
    text = header.strip()
    if text.startswith("["):
        return _normal_host(text.partition("]")[0] + "]")
    return _normal_host(text.partition(":")[0])


def _normal_host(host: str) -> str:
    """Return the host in lower case; IPv6 addresses get brackets, as in a header."""
    host = host.lower().removesuffix(".")
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class ErrorHandler:
    """Turns exceptions of routes into responses: ApiError as its object, others as status 500."""

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
            # %r, because a path may contain line ends.
            log.exception("%s %.200r failed", scope["method"], scope["path"])
            if not started:
                await send_error(
                    send_and_note, ApiError(500, "internal error; the server's log has it")
                )
