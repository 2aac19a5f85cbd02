"""An engine behind a bounded queue: what every route asks to generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.session import EventBatch, Stream
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, Prompt, Request
from specbuild.runtime.serve.bridge import Bridge
from specbuild.runtime.serve.errors import ApiError, engine_error
from specbuild.runtime.serve.metrics import Metrics
from specbuild.runtime.serve.request_record import current_record

# What a client whose request found the queue full is asked to wait.
RETRY_AFTER_S = 1
# Threads that tokenise and render templates. Each keeps for good what the longest text took.
TEXT_THREADS = 4
# Guides that are compiled at once, each in a process of its own.
GUIDE_THREADS = 2

Result = TypeVar("Result")
# A guide that waits longer to be compiled is not followed.
MAX_COMPILE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How an engine is served.

    ``max_queue`` requests may wait beside those that run; ``setting`` is the draft of all, which
    has none where they are ``exact``; ``names`` are those of the model, the first one is shown.
    """

    names: tuple[str, ...]
    max_queue: int = 256
    setting: DraftSetting = field(default_factory=DraftSetting)
    exact: bool = False


@dataclass(frozen=True)
class Load:
    """Requests that run and that wait, and the share of cache pages in use."""

    running: int
    waiting: int
    used_pages: float


class Generation:
    """Requests of one call, which run: an asynchronous iterator of their events by turns.

    :meth:`cancel` aborts what is not done, and is to be called whatever happens.
    """

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.arrived_s = time.monotonic()
        self._service = service
        self._open = len(self.requests)
        self._batches: asyncio.Queue[EventBatch] = asyncio.Queue()
        self._stream: Stream | None = None
        self._record = current_record()
        if self._record is not None:
            self._record.count_prompts(self.requests)

    def start(self, stream: Stream) -> None:
        """The requests are with the engine."""
        self._stream = stream

    def receive(self, batch: EventBatch) -> None:
        """Called on the event loop with what a turn gave."""
        if isinstance(batch, BaseException):
            self._finish(self._open)
            self._service.record_failure(batch)
        else:
            self._service.metrics.events(self, batch)
            if self._record is not None:
                self._record.events(batch)
            self._finish(sum(isinstance(event, FinishEvent) for event in batch))
        self._batches.put_nowait(batch)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        unfinished = len(self.requests)
        while unfinished:
            batch = await self._batches.get()
            if isinstance(batch, RequestError):
                raise ApiError(503, str(batch)) from batch
            if isinstance(batch, BaseException):
                raise ApiError(503, f"the engine failed: {batch}") from batch
            unfinished -= sum(isinstance(event, FinishEvent) for event in batch)
            yield batch

    def cancel(self) -> None:
        """Aborts what is left; its pages come back within a turn of the engine."""
        if self._open and self._stream is not None:
            self._stream.leave()

    def abort(self) -> None:
        """Abort what is left, and end the iteration with an error."""
        self._batches.put_nowait(RequestError("the server is shutting down; the request ended"))
        self.cancel()

    def _finish(self, requests: int) -> None:
        self._open -= requests
        if not self._open:
            self._service.generations.discard(self)
        self._service.release(requests)


class Service:
    """Generates for any number of clients; made and used on one event loop."""

    def __init__(self, engine: Engine, options: ServiceOptions) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(engine.manifest, options.names[0])
        engine.decoder.observe_launch = self.metrics.launched
        self.started_s = int(time.time())
        self.is_draining = False
        self.generations: set[Generation] = set()
        self._bridge = Bridge()
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "specbuild-text")
        self._guide_threads = ThreadPoolExecutor(GUIDE_THREADS, "specbuild-guides")
        engine.isolate_guides()
        self._open = 0
        self._failure: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """Requests that wait or run."""
        return self._open

    @property
    def failure(self) -> str | None:
        """Why the engine's last work failed; None where it did not."""
        return self._failure

    async def in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """What a call on texts gives: a long one lasts many steps, and other clients go on."""
        return await asyncio.get_running_loop().run_in_executor(
            self._text_threads, call, *arguments
        )

    async def check(self, prompts: Sequence[Prompt], params: GenerateParams) -> list[Request]:
        """The prompts as requests of the engine. ApiError where one cannot be served."""
        params = replace(params, exact=True) if self.options.exact else params
        try:
            return await self.in_thread(self.engine.check_prompts, prompts, params)
        except RequestError as error:
            raise engine_error(error) from error

    async def compile_guide(self, guide: Guide | None) -> Guide | None:
        """The guide, once the engine keeps it compiled. ApiError where it is none.

        Compiling takes at most a few seconds of processor time. Two guides are compiled at once,
        apart from the threads that tokenize.
        """
        if guide is None:
            return None
        compiling = self._guide_threads.submit(self.engine.compile, guide)
        try:
            await asyncio.wait_for(asyncio.wrap_future(compiling), MAX_COMPILE_S)
        except RequestError as error:
            raise engine_error(error) from error
        except TimeoutError as error:
            raise ApiError(
                503,
                f"{guide.name} was not compiled within {MAX_COMPILE_S:g} seconds; try again later",
                param=guide.name,
                headers={"Retry-After": str(RETRY_AFTER_S)},
            ) from error
        return guide

    @property
    def max_sequences(self) -> int:
        """How many sequences may be open: those that run, and those that are queued."""
        return self.engine.manifest.limits.max_batch_size + self.options.max_queue

    def check_admission(self, sequences: int) -> None:
        """Raise ApiError if a call with this many sequences cannot be admitted now.

        The status is 400 if the call can never fit, 429 if it does not fit beside the open ones,
        and 503 while the server shuts down. Routes call this before they tokenize prompts.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; try another one")
        if sequences > self.max_sequences:
            raise ApiError(
                400,
                f"the request has {sequences} sequences (prompts times n), but the server holds "
                f"at most {self.max_sequences} running and queued; split it into smaller requests",
                code="too_many_sequences",
            )
        if self._open + sequences > self.max_sequences:
            raise ApiError(
                429,
                f"{self._open} sequences are open and this request has {sequences}, but the "
                f"server holds at most {self.max_sequences}; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def generate(self, requests: Sequence[Request]) -> Generation:
        """Start requests. Raise ApiError if they cannot be admitted (:meth:`check_admission`)."""
        self.check_admission(len(requests))
        generation = Generation(self, requests)
        send = self._bridge.sender(generation.receive)
        try:
            stream = self.engine.session.add(requests, self.options.setting, send)
        except RequestError as error:
            raise engine_error(error) from error
        self._open += len(requests)
        self._idle.clear()
        self.generations.add(generation)
        generation.start(stream)
        return generation

    def release(self, requests: int) -> None:
        """So many requests are through."""
        self._open -= requests
        if requests:
            self._failure = None
        if not self._open:
            self._idle.set()

    def record_failure(self, error: BaseException) -> None:
        """The engine raised: until it serves a request again the server is not healthy."""
        if not isinstance(error, RequestError):
            self._failure = f"{type(error).__name__}: {error}"

    @property
    def load(self) -> Load:
        """What the engine has to do now."""
        running = min(self._open, self.engine.manifest.limits.max_batch_size)
        return Load(running, self._open - running, self.engine.used_pages)

    def exposed_metrics(self) -> bytes:
        """Prometheus' text."""
        if self.engine.prefixes is not None:
            self.metrics.count_prefixes(self.engine.prefixes.statistics)
        for kind, statistics in self.engine.decoder.host_statistics.items():
            self.metrics.count_host_drafter(kind, statistics)
        return self.metrics.exposed(**asdict(self.load))

    def abort(self) -> None:
        """Abort all open requests; their clients get an error."""
        for generation in list(self.generations):
            generation.abort()

    def abandon(self) -> None:
        """End :meth:`drained` although requests are open."""
        self._idle.set()

    async def drained(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()
        self.close()

    def close(self) -> None:
        """End the threads and the processes that compile guides."""
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._guide_threads.shutdown(wait=False, cancel_futures=True)
        self.engine.close_guides()
