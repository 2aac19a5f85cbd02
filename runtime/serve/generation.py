"""The requests of one call, and the batches of their events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from specbuild.runtime.decode.session import EventBatch, Stream
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Event, FinishEvent, Request
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.request_record import current_record

if TYPE_CHECKING:
    from specbuild.runtime.serve.service import Service


class Generation:
    """The requests of one call: an asynchronous iterator over batches of their events.

    Each engine step yields a batch. The caller must always call :meth:`cancel` at the end; it
    aborts unfinished requests.
    """

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.arrived_s = time.monotonic()
        self._service = service
        self._num_open = self._num_unreceived = len(self.requests)
        # When the first and the last token of a request were received, by its number.
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}
        # One task reads: a deque and a future cost a fraction of an asyncio.Queue.
        self._batches: deque[EventBatch] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._direct: Callable[[list[Event]], bool | None] | None = None
        self._stream: Stream | None = None
        self._record = current_record()
        if self._record is not None:
            self._record.count_prompts(self.requests)

    def start(self, stream: Stream) -> None:
        """Store the engine's stream, which runs the requests."""
        self._stream = stream
        self._service.metrics.started(self)

    @property
    def is_finishing(self) -> bool:
        """Whether all requests have finished, with the batch that is being received."""
        return self._num_unreceived == 0

    def receive(self, batch: EventBatch) -> None:
        """Accept the events of one engine step. Called on the event loop."""
        if isinstance(batch, BaseException):
            self._finish(self._num_open)
            self._service.record_failure(batch)
            self._put(batch)
            return
        num_finished = 0
        for event in batch:
            if isinstance(event, FinishEvent):
                num_finished += 1
        num_tokens = len(batch) - num_finished
        self._num_unreceived -= num_finished
        self._service.metrics.events(self, batch, num_tokens)
        if self._record is not None:
            self._record.count_tokens(num_tokens)
        if num_finished:
            self._finish(num_finished)
        elif self._direct is not None and self._arrival is not None and not self._arrival.done():
            self._pass_directly(batch)
            return
        self._put(batch)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        batches = self._batches
        while batches or self._num_unreceived:
            if not batches:
                await self._wait()
                continue
            batch = batches.popleft()
            if isinstance(batch, RequestError):
                raise ApiError(503, str(batch)) from batch
            if isinstance(batch, BaseException):
                raise ApiError(503, f"the engine failed: {batch}") from batch
            yield batch

    def cancel(self) -> None:
        """Abort unfinished requests. The engine releases their pages after its current step."""
        if self._num_open and self._stream is not None:
            self._stream.abort()

    def abort(self) -> None:
        """Abort unfinished requests, and end the iteration with an error."""
        self._put(RequestError("the server is shutting down; the request was aborted"))
        self.cancel()

    def receive_directly(self, receive: Callable[[list[Event]], bool | None]) -> None:
        """Pass batches to ``receive`` when they arrive, while the iterator waits for one.

        Batches that finish a request are always left to the iterator. ``receive`` returns None to
        leave a batch to it, and False if it needs no further batch; the iterator then yields an
        empty one.
        """
        self._direct = receive

    def _pass_directly(self, batch: list[Event]) -> None:
        assert self._direct is not None
        try:
            needs_more = self._direct(batch)
        except Exception as error:  # The batches of other calls must be delivered.
            self._put(error)
            return
        if needs_more is None:
            self._put(batch)
        elif not needs_more:
            self._put([])

    def _put(self, batch: EventBatch) -> None:
        self._batches.append(batch)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _wait(self) -> None:
        """Wait until a batch arrives."""
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _finish(self, requests: int) -> None:
        self._num_open -= requests
        if not self._num_open:
            self._service.generations.discard(self)
        self._service.release(requests)
