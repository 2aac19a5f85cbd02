"""Serves requests of any thread on one engine thread, which owns the executor.

Requests and aborts are messages. The engine thread reads them between two turns of the loop.
Requests with the same draft setting share a loop; the others wait until that loop has finished. The
thread exits when no request is left, and no program to load before its first use.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from specbuild.runtime.decode.decoder import Decoder, DraftSetting
from specbuild.runtime.decode.emission import TextStreams, finish_unstarted
from specbuild.runtime.decode.scoring import TokenScore, token_scores
from specbuild.runtime.decode.served_loop import ServedLoop
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, Request
from specbuild.runtime.settings import PrefillSchedule

# How long requests wait while a measurement or a scoring holds the lock.
LOCK_TIMEOUT_S = 60.0
# The engine's thread releases the lock after the last event of its requests was read.
RELEASE_TIMEOUT_S = 1.0
_THREAD_NAME = "specbuild-engine"
_LOG = logging.getLogger("specbuild")


# The events of one turn for one stream, or the error that ended it.
EventBatch = list[Event] | BaseException
# The scores of a sequence's tokens from the second on, or the error that ended the scoring.
DeliverScores = Callable[[list[TokenScore] | BaseException], None]


class Stream:
    """The events of requests that were added together. Their numbers count from 0.

    An iterator for one thread. It ends after the last request finishes, and raises any error of the
    engine. :meth:`close` aborts unfinished requests. With ``deliver`` there is nothing to iterate
    over: the engine thread calls it with the events of each turn, or with an error. If ``deliver``
    raises, the stream is aborted; other streams continue.
    """

    def __init__(
        self,
        session: Session,
        requests: Sequence[Request],
        deliver: Callable[[EventBatch], None] | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self._session = session
        self._unfinished = len(self.requests)
        self._batches: SimpleQueue[EventBatch] = SimpleQueue()
        self._read: deque[Event] = deque()
        self._deliver = self._batches.put if deliver is None else deliver

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._read:
            if not self._unfinished:
                raise StopIteration
            self._read.extend(self.receive())
        return self._read.popleft()

    def receive(self) -> list[Event]:
        """Wait for the events of one turn. Call it only while requests are unfinished."""
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            self._unfinished = 0
            raise batch
        self._unfinished -= sum(isinstance(event, FinishEvent) for event in batch)
        return batch

    def deliver(self, batch: EventBatch) -> None:
        """Pass events, or an error, to the consumer. Only the engine thread calls it."""
        try:
            self._deliver(batch)
        except Exception:  # of the consumer; the requests of others must go on
            _LOG.exception("a consumer of events failed; its requests are aborted")
            self._deliver = _discard
            self.abort()

    def close(self) -> None:
        """Abort unfinished requests; return when their pages are free.

        Each of them gets a last :class:`FinishEvent` with the reason ``abort``.
        """
        if self._unfinished:
            self.abort().wait()

    def abort(self) -> threading.Event:
        """Abort without waiting. The returned flag is set when the pages are free."""
        return self._session.abort(self)


def _discard(_batch: EventBatch) -> None:
    """Take the place of a consumer that failed."""


@dataclass(frozen=True, eq=False)
class _Join:
    stream: Stream
    setting: DraftSetting


@dataclass(frozen=True, eq=False)
class _Abort:
    """Aborts the requests of ``stream``; None aborts those of all streams."""

    stream: Stream | None
    done: threading.Event


@dataclass(frozen=True, eq=False)
class _Scoring:
    """Scores ``ids``, unless it ``is_cancelled``."""

    ids: Sequence[int]
    num_top: int
    deliver: DeliverScores
    is_cancelled: threading.Event


class Session:
    """Serves the requests of one engine. All methods are thread-safe."""

    def __init__(self, decoder: Decoder, text_stream: TextStreams) -> None:
        self._decoder = decoder
        self._text_stream = text_stream
        self._lock = threading.Lock()
        self._inbox: deque[_Join | _Abort | _Scoring] = deque()
        self._thread: threading.Thread | None = None
        # Streams that no loop serves yet, and scorings. Only the engine thread uses it.
        self._waiting: deque[_Join | _Scoring] = deque()
        # Loads the next programs for each item.
        self._preparation: Iterator[None] | None = None

    def prepare(self, setting: DraftSetting, params: GenerateParams) -> None:
        """Load the programs that requests with these parameters are likely to need.

        Those of a single sequence are loaded when the call returns. The engine thread loads the
        others one by one while no request runs, so a request waits for one program at most. If a
        program cannot be loaded, the first request that needs it gets the error.
        """
        self._preparation = self._decoder.preparation(setting, params)
        if self._prepare_next():
            with self._lock:
                self._start_thread()

    def add(
        self,
        requests: Sequence[Request],
        setting: DraftSetting,
        deliver: Callable[[EventBatch], None] | None = None,
    ) -> Stream:
        """Queue requests. They run whether or not their events are read.

        Raises RequestError if the engine has no such draft, or cannot serve a request with it.
        """
        return self.start(requests, self.checked(requests, setting), deliver)

    def checked(self, requests: Sequence[Request], setting: DraftSetting) -> DraftSetting:
        """Return the draft setting that these requests run with.

        Raises RequestError if the engine has no such draft, or cannot serve a request with it.
        """
        setting = setting.for_requests(requests)
        self._decoder.check(requests, setting)
        return setting

    def start(
        self,
        requests: Sequence[Request],
        setting: DraftSetting,
        deliver: Callable[[EventBatch], None] | None = None,
    ) -> Stream:
        """Queue requests as :meth:`add` does, with the setting that :meth:`checked` returned."""
        stream = Stream(self, requests, deliver)
        if stream.requests:
            self._post(_Join(stream, setting))
        return stream

    def score(self, ids: Sequence[int], num_top: int, deliver: DeliverScores) -> Callable[[], None]:
        """Queue the scoring of a sequence's tokens, each with the ``num_top`` most likely ones.

        It runs between loops: requests that come later wait for it. ``deliver`` is called once by
        the engine thread, with the scores from the second token on or with an error. The returned
        function cancels the scoring; an error is delivered then.
        """
        is_cancelled = threading.Event()
        self._post(_Scoring(ids, num_top, deliver, is_cancelled))
        return is_cancelled.set

    @contextlib.contextmanager
    def exclusive(
        self, requests: Sequence[Request], setting: DraftSetting
    ) -> Iterator[Iterator[Event]]:
        """Run requests in the calling thread and yield an iterator over their events.

        For measurements. No other request runs, and the loop runs only as far as the events are
        read. All prompts are prefilled before the first step. Raises RequestError as :meth:`add`
        does, and if the engine is in use.
        """
        setting = self.checked(requests, setting)
        if not self._decoder.device_lock.acquire(timeout=RELEASE_TIMEOUT_S):
            raise RequestError("the engine is in use; try again when its requests have finished")
        try:
            prefill = PrefillSchedule(steps_between=0)
            loop = self._decoder.loop(setting, text_stream=self._text_stream, prefill=prefill)
            for request in requests:
                loop.add(request)
            with contextlib.closing(loop.run()) as events:
                yield events
        finally:
            self._decoder.device_lock.release()

    def abort(self, stream: Stream | None = None) -> threading.Event:
        """Abort a stream, or all streams. The returned flag is set when their pages are free.

        The abort of all streams also leaves out programs that are not loaded yet.
        """
        message = _Abort(stream, threading.Event())
        self._post(message)
        return message.done

    def join(self, timeout_s: float) -> bool:
        """Wait until the engine's thread has ended. Return False if it still runs.

        Programs that are not loaded yet are left out.
        """
        with self._lock:
            thread, self._preparation = self._thread, None
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _post(self, message: _Join | _Abort | _Scoring) -> None:
        with self._lock:
            self._inbox.append(message)
            self._start_thread()

    def _start_thread(self) -> None:
        """Start the engine thread unless it runs. The caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=_THREAD_NAME, daemon=True)
            self._thread.start()

    def _next_message(self) -> _Join | _Abort | _Scoring | None:
        with self._lock:
            return self._inbox.popleft() if self._inbox else None

    def _serve(self) -> None:
        """Run one loop after another until no request is left (main function of the thread)."""
        while True:
            self._read_messages(None)
            if self._waiting:
                self._serve_first()
                continue
            if self._prepare_next():
                continue
            with self._lock:
                if not self._inbox:
                    self._thread = None
                    return

    def _prepare_next(self) -> bool:
        """Load the next programs. Return False if none is left, or if the engine is in use."""
        preparation = self._preparation
        if preparation is None or not self._decoder.device_lock.acquire(blocking=False):
            return False
        try:
            next(preparation)
            return True
        except StopIteration:
            self._preparation = None
        except Exception as error:
            _LOG.warning("a program cannot be loaded before its first use: %s", error)
            self._preparation = None
        finally:
            self._decoder.device_lock.release()
        return False

    def _serve_first(self) -> None:
        """Acquire the lock and serve the setting of the first waiting request, or score."""
        first = self._waiting[0]
        if not self._decoder.device_lock.acquire(timeout=LOCK_TIMEOUT_S):
            self._waiting.popleft()
            error = RequestError("the engine is scoring a sequence; exhaust or close that iterator")
            (first if isinstance(first, _Scoring) else first.stream).deliver(error)
            return
        try:
            if isinstance(first, _Scoring):
                self._waiting.popleft()
                first.deliver(self._scores(first))
            else:
                self._serve_setting(first)
        finally:
            self._decoder.device_lock.release()

    def _scores(self, scoring: _Scoring) -> list[TokenScore] | BaseException:
        """Return the scores, or the error that ended the scoring."""
        scores: list[TokenScore] = []
        try:
            for rows in self._decoder.score_with_lock(scoring.ids):
                scores += token_scores(rows, scoring.ids, scoring.num_top)
                if scoring.is_cancelled.is_set():
                    return RequestError("the scoring was cancelled")
        except BaseException as error:
            return error
        return scores

    def _serve_setting(self, first: _Join) -> None:
        """Run a loop for all requests with the setting of the first waiting one.

        An error ends the requests of the loop.
        """
        setting = first.setting
        try:
            loop = self._decoder.loop(setting, text_stream=self._text_stream)
        except BaseException as error:
            self._waiting.popleft()
            first.stream.deliver(error)
            return
        served = ServedLoop(loop)
        try:
            with contextlib.closing(loop):
                loop.open()
                self._run(served, setting)
        except BaseException as error:
            # The loop is closed, so the pages are free when a stream receives the error.
            for stream in served.streams:
                stream.deliver(error)
            if self._waiting and self._waiting[0] is first:
                # The loop did not open, and would not open again.
                self._waiting.popleft()
                first.stream.deliver(error)

    def _run(self, served: ServedLoop, setting: DraftSetting) -> None:
        """Run turns until no request is left.

        A scoring, or a request with another setting, blocks later requests.
        """
        while True:
            self._read_messages(served)
            while self._waiting:
                first = self._waiting[0]
                if isinstance(first, _Scoring) or not first.setting.same_as(setting):
                    break
                self._waiting.popleft()
                served.join(first.stream)
            if served.loop.idle:
                return
            served.deliver(served.loop.turn())

    def _read_messages(self, served: ServedLoop | None) -> None:
        """Read all messages: queue new requests, and abort those that leave.

        If the loop fails, unread messages are read afterwards.
        """
        while (message := self._next_message()) is not None:
            if isinstance(message, _Join | _Scoring):
                self._waiting.append(message)
                continue
            if message.stream is None:
                self._preparation = None
            try:
                self._leave(message.stream, served)
            finally:
                message.done.set()

    def _leave(self, stream: Stream | None, served: ServedLoop | None) -> None:
        if served is not None:
            for leaving in served.streams if stream is None else [stream]:
                served.abort(leaving)
        for waiting in list(self._waiting):
            if isinstance(waiting, _Scoring):
                if stream is None:
                    waiting.is_cancelled.set()
            elif stream in (None, waiting.stream):
                self._waiting.remove(waiting)
                unstarted = enumerate(waiting.stream.requests)
                ends: list[Event] = [
                    finish_unstarted(*each, self._text_stream) for each in unstarted
                ]
                waiting.stream.deliver(ends)
