"""Grammars over an engine's tokens: masks and states of outputs, by llguidance.

A mask states which tokens may come next. A token is allowed if the output, extended by it, can
still become a text of the grammar. An end of sequence is allowed if the output is such a text.
llguidance's masks are canonical: if the next bytes are forced, only the token that the tokenizer
would choose for them is allowed.

Work and memory for compilation and masks are limited, whatever a client sends. (M. Moskal et al.,
"llguidance", github.com/guidance-ai/llguidance.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

# The logit of a refused token. No other change makes a logit as low, so the grammar always wins.
REFUSED = np.float32(-3e30)
# Other sequences wait while this process computes a mask. The time of each mask above the first
# limit is added up. If the total exceeds the second limit, the guide moves to a separate process.
MAX_LOCAL_MASK_S = 0.03
MAX_LOCAL_EXCESS_S = 0.3
# If a guide cannot move, it fails when the total exceeds this limit.
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
        """Lower the logits of tokens that are not allowed, in place, in a row fp32 [V]."""
        packed = np.frombuffer(self.bits, np.uint8)
        allowed = np.unpackbits(packed, count=len(logits), bitorder="little")
        np.copyto(logits, REFUSED, where=allowed == 0)


class CheckedTokens(NamedTuple):
    """The result of :meth:`GuideState.check`.

    The guide allows the first ``num_allowed`` tokens. If it ``is_refused``, it does not allow the
    next one. Otherwise it allows all tokens, or the output ``is_complete`` after the allowed ones,
    or the guide failed. ``is_only[i]``: at the place of token i the guide allows a single token.
    The list ends with the refused token, if there is one. ``forced`` are the tokens that must
    follow the allowed ones.
    """

    num_allowed: int
    is_refused: bool
    is_complete: bool
    is_only: Sequence[bool]
    forced: Sequence[int]


class GuideState:
    """The state of a grammar for one output, whose tokens are passed with every call.

    If the output differs from that of the previous call, the matcher returns to their common
    prefix. A state that exceeds a limit has a :attr:`failure` and returns no more masks. If its
    masks are slow, the state that ``move`` returns replaces it at the next :meth:`prepare`, unless
    it :attr:`stays_here`.
    """

    # True if tokens are checked while later steps run, since these cannot wait for another process.
    stays_here = False
    _remote_state: GuideState | None = None
    _excess_s = 0.0

    def __init__(self, matcher: Any, move: Callable[[], GuideState] | None = None) -> None:
        self._matcher = matcher
        self._move = move
        self._consumed = np.zeros(256, np.int32)
        self._num_consumed = 0
        # The tokens that must follow the consumed ones; None if they were not computed yet.
        self._forced: list[int] | None = None
        self.failure: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether another process computes the masks from now on (remote.py)."""
        return self._remote_state is not None or self._is_slow

    @property
    def _is_slow(self) -> bool:
        is_movable = self._move is not None and not self.stays_here
        return is_movable and self._excess_s > MAX_LOCAL_EXCESS_S

    def mask(self, output: np.ndarray) -> TokenMask | None:
        """Return the mask after ``output``, int32 [n]; None if the output is complete or the guide
        failed.
        """
        if self._remote_state is not None:
            mask, self.failure = self._remote_state.mask(output), self._remote_state.failure
            return mask
        started_s = time.thread_time()
        if self.complete(output) or self.failure is not None:
            return None
        bits = self._matcher.compute_bitmask()
        self._add_time(started_s)
        if self.failure is not None:
            return None
        if self._matcher.is_error():
            self._fail()
            return None
        if not np.frombuffer(bits, np.uint8).any():
            self.failure = "no token of the model can continue the output"
            return None
        return TokenMask(bits)

    def allows(self, output: np.ndarray, token: int) -> bool | None:
        """Return whether :meth:`mask` allows a token; None if there is no mask.

        This takes microseconds. A mask of 200 000 tokens may take a millisecond, unless an earlier
        text had the same position in the grammar. An allowed token is consumed at once, since the
        next call has it in its output in most cases.
        """
        if self._remote_state is not None:
            return self._remote_state.allows(output, token)
        started_s = time.thread_time()
        is_allowed = self._allows(output, token)
        self._add_time(started_s)
        return is_allowed

    def check(self, output: np.ndarray, tokens: Sequence[int]) -> CheckedTokens:
        """Check tokens that follow ``output``, up to the first one that :meth:`allows` refuses.

        The allowed tokens are consumed. Only for a state that :attr:`stays_here`.
        """
        assert self._remote_state is None, "another process has the state of this output"
        started_s = time.thread_time()
        self._follow(output)
        num_allowed, is_only, is_refused = 0, list[bool](), False
        while num_allowed < len(tokens) and not self._is_closed and not is_refused:
            forced, left = self._forced_tokens(), tokens[num_allowed:]
            if forced:
                count = _num_equal(forced, left)
                if count and not self._matcher.consume_tokens(left[:count]):
                    # The forced tokens are allowed; none can follow them.
                    num_allowed += count
            else:
                count = self._matcher.try_consume_tokens(left[:1])
            if self._matcher.is_error():
                self._fail()
                break
            is_refused = not count
            is_only += [bool(forced)] * max(count, 1)
            if count:
                self._append(left[:count])
                num_allowed += count
        is_closed = self._is_closed
        is_complete = is_closed and self.failure is None
        forced_next = [] if is_closed else self._forced_tokens()
        self._add_time(started_s)
        return CheckedTokens(num_allowed, is_refused, is_complete, is_only, forced_next)

    @property
    def _is_closed(self) -> bool:
        """Whether nothing may follow the consumed tokens."""
        return self.failure is not None or bool(self._matcher.is_stopped())

    def _allows(self, output: np.ndarray, token: int) -> bool | None:
        if self.complete(output) or self.failure is not None:
            return None
        forced = self._forced_tokens()
        is_allowed = forced[0] == token if forced else self._matcher.try_consume_tokens([token])
        if self._matcher.is_error():
            self._fail()
            return None
        if is_allowed and not forced:
            self._append([token])
        return bool(is_allowed)

    def complete(self, output: np.ndarray) -> bool:
        """Return whether ``output`` is a text of the grammar that no token may continue."""
        if self._remote_state is not None:
            return self._remote_state.complete(output)
        self._follow(output)
        return self.failure is None and bool(self._matcher.is_stopped())

    def forced(self, output: np.ndarray) -> list[int]:
        """Return the tokens that must follow ``output``, up to the next choice."""
        if self._remote_state is not None:
            return self._remote_state.forced(output)
        if self.complete(output) or self.failure is not None:
            return []
        return list(self._forced_tokens())

    def _forced_tokens(self) -> list[int]:
        """Return the tokens that must follow the consumed ones."""
        if self._forced is None:
            self._forced = list(self._matcher.compute_ff_tokens())
        return self._forced

    def prepare(self, output: np.ndarray) -> None:
        """Request the mask after ``output`` in advance, if another process computes it."""
        if self._remote_state is None and self._is_slow and self._move is not None:
            self._remote_state = self._move()
        if self._remote_state is not None:
            self._remote_state.prepare(output)

    def ready(self, output: np.ndarray, timeout_s: float = 0) -> bool:
        """Return whether the mask after ``output`` is available, waiting at most ``timeout_s``."""
        if self._remote_state is None:
            return True
        is_ready = self._remote_state.ready(output, timeout_s)
        self.failure = self._remote_state.failure
        return is_ready

    def close(self) -> None:
        """End the state's process, if it has one."""
        if self._remote_state is not None:
            self._remote_state.close()

    def _add_time(self, started_s: float) -> None:
        """Add the part of a call's time above the limit of a mask to the total."""
        self._excess_s += max(0.0, time.thread_time() - started_s - MAX_LOCAL_MASK_S)
        if self.stays_here and self._excess_s > MAX_STAYING_EXCESS_S:
            self.failure = "its masks take too much time"

    def _follow(self, output: np.ndarray) -> None:
        if self.failure is not None:
            return
        num_common = self._num_common(output)
        if self._num_consumed > num_common:
            self._matcher.rollback(self._num_consumed - num_common)
            self._forced = None
        self._num_consumed = num_common
        new = output[num_common:]
        if len(new):
            tokens = new.tolist()
            self._append(tokens)
            if not self._matcher.consume_tokens(tokens):
                self._fail()

    def _num_common(self, output: np.ndarray) -> int:
        """Return how many of the consumed tokens ``output`` begins with."""
        count = min(self._num_consumed, len(output))
        consumed, begin = self._consumed[:count], output[:count]
        # A comparison of bytes takes a fifth of the time.
        if begin.dtype == np.int32 and consumed.tobytes() == begin.tobytes():
            return count
        differing = np.flatnonzero(consumed != begin)
        return int(differing[0]) if len(differing) else count

    def _append(self, tokens: Sequence[int]) -> None:
        """Record that the matcher consumed ``tokens`` after the earlier ones."""
        first, count = self._num_consumed, self._num_consumed + len(tokens)
        if count > len(self._consumed):
            self._consumed = np.concatenate([self._consumed, np.zeros(count, np.int32)])
        self._consumed[first:count] = tokens
        self._num_consumed, self._forced = count, None

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


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both sequences begin with."""
    count = min(len(first), len(second))
    return next((i for i in range(count) if first[i] != second[i]), count)


def reason_of(matcher: Any) -> str:
    """Return the library's error message without the description of its internal state."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return " ".join(text.split())[:500] or "unknown reason"
