"""Grammars over an engine's tokens: masks and states of outputs, by llguidance.

A mask states which tokens may come next. A token is allowed if the output can still become a text
of the grammar, and an end of sequence if it is one. llguidance's masks are canonical: if the next
bytes are forced, only the tokenizer's own token for them is allowed.

Work and memory for compilation and masks are limited, whatever a client sends. (M. Moskal et al.,
"llguidance", github.com/guidance-ai/llguidance.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

# Lower than any other change to logits can make a token, so that the grammar always wins.
REFUSED = np.float32(-3e30)
# Other sequences wait while this process computes a mask. If masks exceed the first limit by the
# second one in total, the guide moves to a separate process.
MAX_LOCAL_MASK_S = 0.03
MAX_LOCAL_EXCESS_S = 0.3
# The total after which a guide that cannot move fails.
MAX_STAYING_EXCESS_S = 3.0


class TokenMask:
    """The tokens that may come next. ``bits`` has one bit per token, the lowest first."""

    def __init__(self, bits: bytes) -> None:
        self.bits = bits

    def allows(self, token: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    @cached_property
    def only(self) -> int | None:
        """The allowed token if it is the only one, else None."""
        bits = int.from_bytes(self.bits, "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def words(self, count: int) -> np.ndarray:
        """The bits as int32 [count]: token v is bit v % 32 of word v // 32."""
        packed = np.zeros(4 * count, np.uint8)
        bits = np.frombuffer(self.bits, np.uint8)[: len(packed)]
        packed[: len(bits)] = bits
        return packed.view(np.int32)

    def refuse(self, logits: np.ndarray) -> None:
        """Exclude the other tokens from one row ``logits`` fp32 [V], in place."""
        packed = np.frombuffer(self.bits, np.uint8)
        allowed = np.unpackbits(packed, count=len(logits), bitorder="little")
        np.copyto(logits, REFUSED, where=allowed == 0)


class GuideState:
    """The state of a grammar for one output, whose tokens are passed with every call.

    It moves between outputs by their common prefix. A state that exceeds a limit has a
    :attr:`failure` and masks nothing more. If its masks take long, the state that ``move`` returns
    replaces it at the next :meth:`prepare`, unless it :attr:`stays_here`.
    """

    # Tokens are checked while later steps are in flight, which cannot wait for another process.
    stays_here = False
    _moved: GuideState | None = None
    _excess_s = 0.0

    def __init__(self, matcher: Any, move: Callable[[], GuideState] | None = None) -> None:
        self._matcher = matcher
        self._move = move
        self._read = np.zeros(256, np.int32)
        self._count = 0
        self.failure: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether another process computes the masks from now on (remote.py)."""
        return self._moved is not None or self._is_slow

    @property
    def _is_slow(self) -> bool:
        is_movable = self._move is not None and not self.stays_here
        return is_movable and self._excess_s > MAX_LOCAL_EXCESS_S

    def mask(self, output: np.ndarray) -> TokenMask | None:
        """Return the mask after ``output``, int32 [n]; None if the output is complete or the guide
        failed.
        """
        if self._moved is not None:
            mask, self.failure = self._moved.mask(output), self._moved.failure
            return mask
        with self._timed():
            if self.complete(output) or self.failure is not None:
                return None
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
            return None
        if not any(bits):
            self.failure = "no token of the model can continue the output"
            return None
        return TokenMask(bits)

    def allows(self, output: np.ndarray, token: int) -> bool | None:
        """Return whether :meth:`mask` allows a token; None if there is no mask.

        This takes microseconds. A mask may take a millisecond for 200 000 tokens if no earlier text
        had such a position.
        """
        if self._moved is not None:
            return self._moved.allows(output, token)
        with self._timed():
            return self._allows(output, token)

    def _allows(self, output: np.ndarray, token: int) -> bool | None:
        if self.complete(output) or self.failure is not None:
            return None
        forced = self._matcher.compute_ff_tokens()
        follows = self._matcher.validate_tokens([token]) == 1 if not forced else forced[0] == token
        if self._matcher.is_error():
            self._fail()
            return None
        return bool(follows)

    def complete(self, output: np.ndarray) -> bool:
        """Return whether ``output`` is a text of the grammar that no token may continue."""
        if self._moved is not None:
            return self._moved.complete(output)
        self._follow(output)
        return self.failure is None and bool(self._matcher.is_stopped())

    def forced(self, output: np.ndarray) -> list[int]:
        """Return the tokens that must follow ``output``, up to the next choice."""
        if self._moved is not None:
            return self._moved.forced(output)
        if self.complete(output) or self.failure is not None:
            return []
        return list(self._matcher.compute_ff_tokens())

    def prepare(self, output: np.ndarray) -> None:
        """Request the mask after ``output`` in advance, if another process computes it."""
        if self._moved is None and self._is_slow and self._move is not None:
            self._moved = self._move()
        if self._moved is not None:
            self._moved.prepare(output)

    def ready(self, output: np.ndarray, timeout_s: float = 0) -> bool:
        """Return whether the mask after ``output`` is available, waiting at most ``timeout_s``."""
        if self._moved is None:
            return True
        is_ready = self._moved.ready(output, timeout_s)
        self.failure = self._moved.failure
        return is_ready

    def close(self) -> None:
        """End the state's process, if it has one."""
        if self._moved is not None:
            self._moved.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time by which a mask exceeded the limit."""
        started_s = time.thread_time()
        try:
            yield
        finally:
            self._excess_s += max(0.0, time.thread_time() - started_s - MAX_LOCAL_MASK_S)
            if self.stays_here and self._excess_s > MAX_STAYING_EXCESS_S:
                self.failure = "its masks take too much time"

    def _follow(self, output: np.ndarray) -> None:
        if self.failure is not None:
            return
        common = min(self._count, len(output))
        differing = np.flatnonzero(self._read[:common] != output[:common])
        if len(differing):
            common = int(differing[0])
        if self._count > common:
            self._matcher.rollback(self._count - common)
        new = output[common:]
        if len(output) > len(self._read):
            self._read = np.concatenate([self._read, np.zeros(len(output), np.int32)])
        self._read[common : len(output)] = new
        self._count = len(output)
        if len(new) and not self._matcher.consume_tokens(new.tolist()):
            self._fail()

    def _fail(self) -> None:
        self.failure = reason_of(self._matcher)


class Grammar:
    """A compiled guide. ``move`` returns the state of an output in another process."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.move: Callable[[], GuideState] | None = None

    def begin(self) -> GuideState:
        """Return the state of an output without tokens."""
        return GuideState(self._matcher.deep_copy(), self.move)


def reason_of(matcher: Any) -> str:
    """Return the library's error message without the description of its internal state."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return " ".join(text.split())[:500] or "unknown reason"
