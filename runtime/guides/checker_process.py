"""The process that :class:`~specbuild.runtime.guides.checker.GuideChecker` starts.

It loads the tokenizer once. Two forks serve each connection. One compiles the guide under limits.
The other waits for it and reports the signal if one killed it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.checker import (
    MAX_CPU_S,
    MAX_FOLLOW_CPU_S,
    MAX_MASK_S,
    MAX_MEMORY_BYTES,
    MAX_WALL_S,
    STACK_BYTES,
    decode_guide,
    receive_message,
    send_message,
)
from specbuild.runtime.guides.compiler import (
    Vocabulary,
    checked_text,
    compile_text,
    load_library,
    on_stack,
    read_tokens,
)
from specbuild.runtime.guides.grammar import Grammar
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.limits import forces_little

# The number of tokens of a trial output, and the maximum time of each of its masks. If a mask takes
# longer, the guide is not light.
_TRIAL_TOKENS = 16
_MAX_LIGHT_S = 0.01
# Decoding has priority over checks.
_NICE = 5
_REASONS_BY_SIGNAL = {
    signal.SIGXCPU: f"takes more than {MAX_CPU_S} seconds of processor time to compile",
    signal.SIGALRM: f"takes more than {MAX_WALL_S} seconds to compile",
    signal.SIGSEGV: "is nested too deeply",
    signal.SIGBUS: "is nested too deeply",
    signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile",
}


def main(control: socket.socket) -> None:
    """Fork for each connection that ``control`` delivers, until it closes."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = Vocabulary(**json.load(sys.stdin))
    # The kernel reaps the forks of this process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    tokens = failure = None
    try:
        library = load_library(Guide.json(name="guide"))
        tokens = read_tokens(library, vocabulary, Guide.json(name="guide"))
    except RequestError as error:
        failure = str(error)
    if tokens is not None:
        # Load everything that every fork needs, before the first fork.
        guide = Guide.json()
        grammar = compile_text(library, tokens, checked_text(library, guide), guide)
        _has_fast_masks(grammar)
    gc.freeze()
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        if os.fork() == 0:
            control.close()
            with socket.socket(fileno=received[0]) as connection:
                _serve(connection, tokens, failure)
            os._exit(0)
        os.close(received[0])


def _serve(connection: socket.socket, tokens: Any, failure: str | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message = receive_message(connection)
    if message is None:
        return
    request = json.loads(message)
    guide = decode_guide(request["guide"])
    if failure is not None:
        send_message(connection, _error_message(failure))
        return
    worker = os.fork()
    if worker == 0:
        with contextlib.suppress(BaseException):
            _set_limits()
            on_stack(
                lambda: _compile_and_reply(connection, guide, tokens, request["follow"]),
                STACK_BYTES,
            )
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    if os.WIFSIGNALED(status):
        fatal_signal = signal.Signals(os.WTERMSIG(status))
        reason = _REASONS_BY_SIGNAL.get(fatal_signal, f"cannot be compiled ({fatal_signal.name})")
        with contextlib.suppress(OSError):
            send_message(connection, _error_message(str(guide.error(reason))))


def _set_limits() -> None:
    """Set the limits of this process. A signal kills it if it exceeds one."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_FOLLOW_CPU_S + MAX_CPU_S))
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
    status = Path("/proc/self/statm")
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        max_bytes = used + MAX_MEMORY_BYTES + STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _compile_and_reply(connection: socket.socket, guide: Guide, tokens: Any, follow: bool) -> None:
    """Compile a guide and reply. With ``follow``, answer requests for masks afterwards."""
    try:
        library = load_library(guide)
        text = checked_text(library, guide)
        grammar = compile_text(library, tokens, text, guide)
    except RequestError as error:
        send_message(connection, _error_message(str(error)))
        return
    except MemoryError:
        send_message(
            connection, _error_message(str(guide.error(_REASONS_BY_SIGNAL[signal.SIGABRT])))
        )
        return
    except BaseException as error:  # a panic of the library is not an Exception
        reason = " ".join(f"cannot be compiled: {error!r}".split())[:500]
        send_message(connection, _error_message(str(guide.error(reason))))
        return
    if not follow:
        state = grammar.begin()
        first = state.mask(np.zeros(0, np.int32))
        if first is None:
            # All outputs of a grammar share its lexer states. This is the second output, so it may
            # exceed their limit although the first did not.
            reason = f"cannot be followed: {state.failure or 'it allows nothing'}"
            send_message(connection, _error_message(str(guide.error(reason))))
            return
        is_light = forces_little(json.loads(text)["grammars"]) and _has_fast_masks(grammar)
        reply = {"text": text, "first": first.bits.hex(), "is_light": is_light}
        send_message(connection, json.dumps(reply).encode())
    else:
        send_message(connection, b"{}")
        max_cpu_s = MAX_FOLLOW_CPU_S + MAX_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
        _follow(connection, grammar)


def _has_fast_masks(grammar: Grammar) -> bool:
    """Return whether all masks of a trial output, which has random tokens, are fast."""
    rng = np.random.default_rng(0)
    state, output = grammar.begin(), np.zeros(0, np.int32)
    for _ in range(_TRIAL_TOKENS):
        started_s = time.thread_time()
        mask = state.mask(output)
        state.forced(output)
        if len(output) and time.thread_time() - started_s > _MAX_LIGHT_S:
            return False
        if mask is None:
            break
        bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
        output = np.append(output, np.int32(_random_token(rng, np.flatnonzero(bits))))
    return True


def _random_token(rng: np.random.Generator, tokens: np.ndarray) -> int:
    return int(tokens[rng.integers(len(tokens))])


def _follow(connection: socket.socket, grammar: Grammar) -> None:
    """Send the mask after each output, until the connection closes."""
    state, output = grammar.begin(), np.zeros(0, np.int32)
    signal.setitimer(signal.ITIMER_REAL, 0)
    while (message := receive_message(connection)) is not None:
        num_common = int.from_bytes(message[:4], "little")
        output = np.concatenate([output[:num_common], np.frombuffer(message[4:], np.int32)])
        signal.setitimer(signal.ITIMER_REAL, MAX_MASK_S)
        mask = state.mask(output)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if mask is not None:
            send_message(connection, b"m" + mask.bits)
        elif state.failure is not None:
            send_message(connection, b"f" + state.failure.encode())
        else:
            send_message(connection, b"c")


def _error_message(reason: str) -> bytes:
    return json.dumps({"refused": reason}).encode()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        main(control)
