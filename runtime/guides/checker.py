"""Processes that compile guides, and compute their masks, under limits of time and memory.

llguidance is native code. A client's guide may make it overflow a stack, fill the memory or compute
for minutes. So other processes run it first (``checker_process.py``). The first guide starts a
process, which holds llguidance's tokenizer and forks a process for each guide. If a fork dies, only
its guide fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide

# Limits of a forked process: its processor time and its wall-clock time.
MAX_CPU_S = 2
MAX_WALL_S = 15
# Memory of a forked process in addition to the tokenizer.
MAX_MEMORY_BYTES = 512 << 20
# llguidance recurses. This stack is smaller than those on which this process runs llguidance later,
# so a guide that passes the check does not overflow them.
STACK_BYTES = 4 << 20
# Limits of a guide with its own process: the time of one mask, and the processor time of all masks.
MAX_MASK_S = 5
MAX_FOLLOW_CPU_S = 30

_SEND_BYTES = 1 << 19
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class CheckedGuide:
    """A guide that passed the check.

    ``text`` is the guide in llguidance's JSON format, and ``first`` has the bits of its first mask.
    A guide that ``is_light`` forces no long text, and its masks are fast. So the decoding process
    can compute them.
    """

    text: str
    first: bytes
    is_light: bool


_MODULE = "specbuild.runtime.guides.checker_process"


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send one message, which :func:`receive_message` returns at the other end."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(connection: socket.socket) -> bytes | None:
    """Return the next message; None at the end of the connection."""
    header = _receive(connection, _LENGTH.size)
    return None if header is None else _receive(connection, _LENGTH.unpack(header)[0])


def _receive(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


class GuideChecker:
    """Compiles guides in separate processes. Callable from any thread.

    ``vocabulary`` describes llguidance's tokenizer in JSON: ``tokenizer``, ``size`` and ``ends``.
    """

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._vocabulary = json.dumps(vocabulary).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process that holds the tokenizer if it is not running. Do not wait for it."""
        with self._lock:
            if self._closed or (self._process is not None and self._process.poll() is None):
                return
            self._stop()
            self._control, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as vocabulary:
                vocabulary.write(self._vocabulary)
                vocabulary.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=vocabulary,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # A new session: its forks are killed with it, and Ctrl-C does not reach it.
                    start_new_session=True,
                )

    def check(self, guide: Guide) -> CheckedGuide:
        """Return the checked guide. RequestError if it is invalid or exceeds a limit."""
        with self._fork(guide) as connection:
            reply = _reply(connection, guide)
        return CheckedGuide(reply["text"], bytes.fromhex(reply["first"]), reply["is_light"])

    def follow(self, guide: Guide) -> RemoteMatcher:
        """Return a matcher whose process computes the masks. Raises RequestError as :meth:`check`
        does.
        """
        return RemoteMatcher(self._fork(guide, follow=True), guide)

    def close(self) -> None:
        """Kill the processes."""
        with self._lock:
            self._closed = True
            self._stop()

    def _fork(self, guide: Guide, *, follow: bool = False) -> socket.socket:
        """Start a process, send it the guide and return the connection to it."""
        self.start()
        ours, theirs = socket.socketpair()
        ours.settimeout(MAX_WALL_S)
        # The guide must fit into the buffer, so that sending does not wait for the reader.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        try:
            with theirs, self._lock:
                if self._control is None:
                    raise BrokenPipeError("the server is shutting down")
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
            request = {"guide": encode_guide(guide), "follow": follow}
            send_message(ours, json.dumps(request, ensure_ascii=False).encode())
        except OSError as error:
            ours.close()
            raise guide.error(f"cannot be checked: {error}; try again") from error
        return ours

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class RemoteMatcher:
    """A guide in another process: :meth:`request` requests a mask, :meth:`read` returns it."""

    def __init__(self, connection: socket.socket, guide: Guide) -> None:
        self._connection = connection
        self._guide = guide
        self._sent = np.zeros(0, np.int32)
        self._compiled = False
        self._failure: str | None = None

    def request(self, output: np.ndarray) -> None:
        """Request the mask after ``output``. The previous mask must have been read."""
        num_common = min(len(self._sent), len(output))
        differing = np.flatnonzero(self._sent[:num_common] != output[:num_common])
        num_common = int(differing[0]) if len(differing) else num_common
        self._sent = output.copy()
        message = _LENGTH.pack(num_common) + output[num_common:].astype(np.int32).tobytes()
        # If the process has died, reading its reply detects it.
        with contextlib.suppress(OSError):
            send_message(self._connection, message)

    def ready(self, timeout_s: float = 0) -> bool:
        """Return whether the reply has arrived. Wait for it for at most ``timeout_s``."""
        if not self._readable(timeout_s):
            return False
        if not self._compiled:
            # The first reply confirms the compilation; the mask follows it.
            self._read_compiled()
            return self._failure is not None or self._readable(timeout_s)
        return True

    def read(self) -> tuple[bytes | None, str | None]:
        """Return the bits of the mask, and the reason if the guide failed.

        If the guide failed, the bits are None. If the output is complete, both are None.
        """
        if not self._compiled:
            self._read_compiled()
        if self._failure is not None:
            return None, self._failure
        try:
            message = receive_message(self._connection)
        except OSError:
            message = None
        if message is None or message[:1] not in (b"m", b"c", b"f"):
            return None, "its masks take too much time or memory"
        if message[:1] == b"m":
            return message[1:], None
        return None, message[1:].decode() or None

    def close(self) -> None:
        """End the process."""
        self._connection.close()

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _read_compiled(self) -> None:
        self._compiled = True
        try:
            _reply(self._connection, self._guide)
        except RequestError as error:
            self._failure = str(error)


def encode_guide(guide: Guide) -> dict[str, Any]:
    """Return a guide as an object that can be written as JSON."""
    return {
        "kind": guide.kind,
        "source": guide.source,
        "lenient": guide.lenient,
        "name": guide.name,
        "parts": [[name, encode_guide(part)] for name, part in guide.parts],
    }


def decode_guide(description: Mapping[str, Any]) -> Guide:
    """Return the guide that :func:`encode_guide` encoded."""
    parts = tuple((name, decode_guide(part)) for name, part in description["parts"])
    return Guide(**{**description, "parts": parts})


def _reply(connection: socket.socket, guide: Guide) -> dict[str, Any]:
    """Return the reply of a process. RequestError if the guide was rejected or the process died."""
    try:
        message = receive_message(connection)
    except OSError:
        message = None
    if message is None:
        raise guide.error("cannot be checked: its process was killed; try again")
    reply: dict[str, Any] = json.loads(message)
    if "refused" in reply:
        raise RequestError(reply["refused"], field=guide.name)
    return reply
