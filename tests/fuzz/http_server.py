"""A server within the fuzzer's process, and a client that sends it whatever bytes there are."""

from __future__ import annotations

import http.client
import io
import logging
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.http_requests import KEY, MODEL, Sent
from fuzz.verdicts import ContradictionError

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine

# How long a server may say nothing. Where more of a request may come it waits: then its client
# says after the shorter time that there is no more.
MAX_SILENT_S = 10.0
WAITS_S = 0.3
_STARTS_S = 120.0
_MAX_ANSWER = 64 << 20


@dataclass(frozen=True)
class Answer:
    """A status, 0 where the server closed the connection without one; its type and its bytes."""

    status: int
    content_type: str = ""
    body: bytes = b""


class FuzzedServer:
    """An engine as `specbuild serve` serves it, with a key, on a thread of this process.

    ``witnessed``: what a client gets that nobody disturbs, once it has asked.
    """

    witnessed: str | None = None

    def __init__(self, engine: Engine) -> None:
        from specbuild.runtime.serve.app import App, AppOptions
        from specbuild.runtime.serve.parsers.output_formats import output_format
        from specbuild.runtime.serve.server import Address, Server
        from specbuild.runtime.serve.service import ServiceOptions

        assert engine.text is not None
        eos = engine.manifest.target.eos_token_ids
        form = output_format(engine.text, eos, reasoning="think", tool_calls="hermes")
        app = App(
            engine,
            AppOptions(service=ServiceOptions(names=(MODEL,)), output_format=form, keys=(KEY,)),
        )
        started = threading.Event()
        listening = Address(port=0).listen()
        self._place = listening.getsockname()
        server = Server(app, ready=lambda _: started.set())
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
        assert started.wait(_STARTS_S)
        self._told = io.StringIO()
        handler = logging.StreamHandler(self._told)
        # A warning of an unknown field is no failure.
        handler.setLevel(logging.ERROR)
        logging.getLogger("specbuild.serve").addHandler(handler)

    def send(self, sent: Sent) -> Exchange:
        """Sends a request, whose answer may be read later."""
        client = socket.create_connection(self._place, timeout=MAX_SILENT_S)
        with suppress(ConnectionError):  # refused before all of it was sent
            client.sendall(sent.data)
        return Exchange(client, sent)

    def log(self) -> str:
        """What the server has logged of its own failures since it was asked last."""
        told = self._told.getvalue()
        self._told.seek(0)
        self._told.truncate()
        return told


class Exchange:
    """A request that was sent."""

    def __init__(self, client: socket.socket, sent: Sent) -> None:
        self._client = client
        self._sent = sent

    def answer(self) -> Answer:
        """The first answer. Raises ContradictionError where the server stalls or babbles."""
        with self._client:
            try:
                if self._sent.open and not self._speaks(WAITS_S):
                    with suppress(OSError):
                        self._client.shutdown(socket.SHUT_WR)
                self._client.settimeout(MAX_SILENT_S)
                response = http.client.HTTPResponse(self._client, method=self._sent.method)
                response.begin()
                body = response.read(_MAX_ANSWER)
            except TimeoutError:
                raise ContradictionError(f"silent for {MAX_SILENT_S:g} s") from None
            except (http.client.RemoteDisconnected, http.client.IncompleteRead, ConnectionError):
                return Answer(0)
            except http.client.HTTPException as error:
                raise ContradictionError(f"an answer that is no HTTP: {error!r:.200}") from None
        return Answer(response.status, response.headers.get("content-type", ""), body)

    def _speaks(self, seconds: float) -> bool:
        self._client.settimeout(seconds)
        try:
            self._client.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


@cache
def server_of(directory: Path) -> FuzzedServer:
    """The server of an engine, which lives as long as this process."""
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.settings import RuntimeSettings

    settings = RuntimeSettings(cache_dir=directory.parent / "cache", prefix_caching="on")
    engine = Engine.load(directory, settings)
    return FuzzedServer(engine)
