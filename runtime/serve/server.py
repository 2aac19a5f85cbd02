"""Runs the application: listening socket, signals, and a shutdown that finishes open requests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.app import App
from specbuild.runtime.serve.connection import KEEP_ALIVE_S, Connection

# Time for open requests after the first signal.
DRAIN_TIMEOUT_S = 30
# Time for clients to read the error of an aborted request, and for the engine to end its step.
CLOSE_TIMEOUT_S = 5.0
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a server: a host and a port (0 selects a free one), or a Unix socket.

    With a certificate the server speaks HTTPS. RequestError if the files cannot be read.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def __post_init__(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise RequestError("--ssl-keyfile needs --ssl-certfile")
        if self.ssl_certfile is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except (OSError, ValueError) as error:
                raise RequestError(f"cannot read the certificate or its key: {error}") from error

    @property
    def scheme(self) -> str:
        """The scheme of its URLs."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it."""
        return self.uds is None and not (
            self.host in ("localhost", "::1") or self.host.startswith("127.")
        )

    @property
    def default_hosts(self) -> tuple[str, ...]:
        """The accepted ``Host`` headers: the loopback names on loopback, else any (empty)."""
        if self.uds is not None or self.is_public:
            return ()
        return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", self.host)))

    def listen(self) -> socket.socket:
        """Return the listening socket. Raise RequestError if the address is not available."""
        try:
            if self.uds is not None:
                listener = self._bind_uds(self.uds)
            else:
                addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                family, socket_type, protocol, _, socket_address = addresses[0]
                listener = socket.socket(family, socket_type, protocol)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(socket_address)
            # Listen at once: this detects a port in use, and other servers detect this socket.
            listener.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            raise RequestError(f"cannot listen on {self}: {error}; choose another") from error
        return listener

    def _bind_uds(self, path: Path) -> socket.socket:
        if path.is_socket():
            if _is_live(path):
                raise OSError("another server listens on it")
            path.unlink()  # its server was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        return listener

    def __str__(self) -> str:
        return str(self.uds) if self.uds is not None else f"{self.host}:{self.port}"


def _is_live(path: Path) -> bool:
    """Return whether a process listens on a Unix socket, or may do so."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # its backlog is full, or it belongs to another user
        return True


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file; None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Server(uvicorn.Server):
    """Calls ``ready`` with the socket's name once requests are served.

    After the first SIGTERM or SIGINT, new requests are refused and open ones finish. After a second
    signal or 30 seconds, open requests are aborted: each client gets an error, which is an event in
    a stream. A third signal ends the process at once. ``notify`` is called with a sentence about
    each step, except the last.
    """

    def __init__(
        self,
        app: App,
        *,
        ready: Callable[[object], None],
        notify: Callable[[str], None] = lambda _: None,
        address: Address | None = None,
    ) -> None:
        config = uvicorn.Config(
            app.asgi,
            http=Connection,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            ssl_certfile=None if address is None else address.ssl_certfile,
            ssl_keyfile=None if address is None else address.ssl_keyfile,
        )
        super().__init__(config)
        self._app = app
        self._ready = ready
        self._notify = notify
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call ``ready``."""
        await super().startup(sockets)
        if self.started and sockets:
            self._ready(sockets[0].getsockname())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests finish, and abort those that exceed the drain timeout."""
        self._app.drain()
        await self._app.responses.close()
        if count := len(self.server_state.tasks):
            self._notify(
                f"shutting down: {_requests(count)} left, {DRAIN_TIMEOUT_S} seconds to finish; "
                "press ctrl-C again to abort"
            )
        else:
            self._notify("shutting down: no request is open")
        abort_task = asyncio.create_task(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            abort_task.cancel()

    async def _abort_later(self) -> None:
        """Wait for the second signal or the timeout. Then abort the requests, the connections and
        the wait for the engine, in this order.
        """
        end_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self._signals < 2 and time.monotonic() < end_s:
            # Signal handlers cannot wake the event loop.
            await asyncio.sleep(0.05)
        if count := len(self.server_state.tasks):
            self._notify(f"aborting {_requests(count)}")
        self._app.service.abort()
        await asyncio.sleep(CLOSE_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # the client does not read
        await asyncio.sleep(CLOSE_TIMEOUT_S)
        self._app.service.abandon()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers and keep them, since more signals may arrive at shutdown."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Count a signal. Unlike uvicorn, do not raise it again after the shutdown, since a
        requested end is not a failure.
        """
        self._signals += 1
        self.should_exit = True
        if self._signals > 2:
            os._exit(1)


def _requests(count: int) -> str:
    return f"{count} request" + ("s" if count > 1 else "")


def serve(
    app: App, address: Address, *, ready: Callable[[object], None], notify: Callable[[str], None]
) -> None:
    """Serve until a signal. Raise RequestError if the address is not available."""
    listener = address.listen()
    socket_file = None if address.uds is None else _file_id(address.uds)
    # The objects of libraries and of the engine live as long as the process. A full collection that
    # visits them delays all streams.
    gc.collect()
    gc.freeze()
    try:
        Server(app, ready=ready, notify=notify, address=address).run(sockets=[listener])
    finally:
        listener.close()
        app.close()
        # Another server may have replaced the socket file.
        if address.uds is not None and socket_file == _file_id(address.uds):
            address.uds.unlink(missing_ok=True)
    if not app.is_stopped(CLOSE_TIMEOUT_S):
        # Python's finalization crashes while another thread runs the engine.
        notify("the engine did not stop; ending the process")
        os._exit(1)
