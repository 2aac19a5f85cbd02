"""Runs the application: a socket, signals, and a closing that loses no accepted request."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.connection import KEEP_ALIVE_S, Connection

# How long open requests may go on once the server is asked to end.
DRAIN_TIMEOUT_S = 30
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens: a host and a port (0 is a free one), or a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None

    @property
    def beyond_loopback(self) -> bool:
        """Whether other machines can reach it."""
        return self.uds is None and not (
            self.host in ("localhost", "::1") or self.host.startswith("127.")
        )

    def listen(self) -> socket.socket:
        """The bound socket. RequestError where it cannot be had."""
        try:
            if self.uds is not None:
                return self._listen_here(self.uds)
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, place = found[0]
            listening = socket.socket(family, kind, protocol)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
        except (OSError, OverflowError) as error:
            raise RequestError(f"cannot listen on {self}: {error}; choose another") from error
        return listening

    def _listen_here(self, path: Path) -> socket.socket:
        if path.is_socket():
            path.unlink()  # of a server that was killed
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        return listening

    def __str__(self) -> str:
        return str(self.uds) if self.uds is not None else f"{self.host}:{self.port}"


class Server(uvicorn.Server):
    """``ready`` is called with the socket's name when requests are served.

    At the first SIGTERM or SIGINT no new request is taken, and those that were accepted are served
    to their end; at the second, or after 30 seconds, they are aborted.
    """

    def __init__(self, app: App, *, ready: Callable[[object], None]) -> None:
        config = uvicorn.Config(
            app.asgi,
            http=Connection,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        )
        super().__init__(config)
        self._app = app
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, and says so."""
        await super().startup(sockets)
        if self.started and sockets:
            self._ready(sockets[0].getsockname())

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """A signal asks for the end, which is no failure of the process."""
        self._app.drain()
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(app: App, address: Address, *, ready: Callable[[object], None]) -> None:
    """Serves until a signal asks for the end. RequestError where the address cannot be had."""
    listening = address.listen()
    try:
        Server(app, ready=ready).run(sockets=[listening])
    finally:
        listening.close()
        if address.uds is not None:
            address.uds.unlink(missing_ok=True)
