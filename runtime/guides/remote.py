"""Guides whose masks are computed by a separate process, so that slow masks block nothing.

Such a guide forces text without a known bound, or its masks were slow when it was checked. Its
sequence takes part in a step only if the mask of its next token has arrived. It has no draft, since
a draft needs masks of later positions, which were not requested. The tokens are the same as with a
local guide, since each token is chosen with the mask of its position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.checker import GuideChecker, RemoteMatcher
from specbuild.runtime.guides.grammar import GuideState, TokenMask
from specbuild.runtime.guides.guide import Guide

# The maximum number of such processes, since each needs memory. Further sequences wait.
MAX_FOLLOWERS = 4


class RemoteGrammar:
    """A guide that was compiled in another process, with its ``first`` mask."""

    def __init__(
        self, checker: GuideChecker, guide: Guide, first: bytes, followers: threading.Semaphore
    ) -> None:
        self._checker = checker
        self._guide = guide
        self._first = first
        self._followers = followers

    def begin(self) -> RemoteGuideState:
        """Return the state of an output without tokens."""
        return RemoteGuideState(self._open, self._followers, self._first)

    def _open(self) -> RemoteMatcher:
        return self._checker.follow(self._guide)


class RemoteGuideState(GuideState):
    """A :class:`GuideState` whose masks are computed by another process.

    :meth:`prepare` requests a mask, and :meth:`ready` returns whether it is available. If it is
    not, :meth:`mask` requests it and waits.
    """

    @property
    def is_remote(self) -> bool:
        """Always True."""
        return True

    def __init__(
        self,
        follow: Callable[[], RemoteMatcher],
        followers: threading.Semaphore,
        first: bytes,
    ) -> None:
        self.failure = None
        self._follow_guide = follow
        self._followers = followers
        self._matcher: RemoteMatcher | None = None
        self._first = TokenMask(first)
        # The output whose mask is requested; None if no request is pending.
        self._requested: np.ndarray | None = None
        # The last mask, and the output that it follows.
        self._output = np.zeros(0, np.int32)
        self._mask: TokenMask | None = self._first

    def prepare(self, output: np.ndarray) -> None:
        """Request the mask after ``output``."""
        if self.failure is not None or self._requested is not None or self._has_mask(output):
            return
        if not len(output):
            self._output, self._mask = output.copy(), self._first
        elif self._matcher is not None or self._open():
            assert self._matcher is not None
            self._matcher.request(output)
            self._requested = output.copy()

    def ready(self, output: np.ndarray, timeout_s: float = 0) -> bool:
        """Return whether the mask after ``output`` is available, waiting at most ``timeout_s``."""
        self.prepare(output)
        if self._requested is not None and self._matcher is not None:
            if not self._matcher.ready(timeout_s):
                return False
            self._receive()
            # If the reply was for another output, request the mask of this one.
            self.prepare(output)
        return self.failure is not None or self._has_mask(output)

    def mask(self, output: np.ndarray) -> TokenMask | None:
        """Return the mask after ``output``; None if the output is complete or the guide failed."""
        while not self.ready(output, timeout_s=1.0):
            pass
        return self._mask if self.failure is None else None

    def allows(self, output: np.ndarray, token: int) -> bool | None:
        """Return whether :meth:`mask` allows a token; None if there is no mask."""
        mask = self.mask(output)
        return None if mask is None else mask.allows(token)

    def complete(self, output: np.ndarray) -> bool:
        """Return whether ``output`` is known to be complete."""
        return self.failure is None and self._has_mask(output) and self._mask is None

    def forced(self, output: np.ndarray) -> list[int]:  # noqa: ARG002
        """Return no tokens, since these sequences have no drafts."""
        return []

    def close(self) -> None:
        """End the process."""
        if self._matcher is not None:
            self._matcher.close()
            self._matcher = None
            self._followers.release()

    def __del__(self) -> None:
        self.close()

    def _has_mask(self, output: np.ndarray) -> bool:
        return self._requested is None and np.array_equal(self._output, output)

    def _open(self) -> bool:
        """Start the process, unless the maximum number of processes is running."""
        if not self._followers.acquire(blocking=False):
            return False
        try:
            self._matcher = self._follow_guide()
        except RequestError as error:
            self._followers.release()
            self.failure = str(error)
        return self._matcher is not None

    def _receive(self) -> None:
        assert self._matcher is not None and self._requested is not None
        bits, self.failure = self._matcher.read()
        self._output, self._requested = self._requested, None
        self._mask = None if bits is None else TokenMask(bits)
