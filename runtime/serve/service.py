"""An engine with a bounded queue, which runs the requests of all routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.scoring import TokenScore
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams, Prompt, Request
from specbuild.runtime.sampling import served_sampling
from specbuild.runtime.serve.bridge import Bridge
from specbuild.runtime.serve.errors import ApiError, engine_error
from specbuild.runtime.serve.generation import Generation
from specbuild.runtime.serve.metrics import Metrics

# Value of Retry-After if the queue is full.
RETRY_AFTER_S = 1
# Threads for tokenizers and templates. Each retains the memory of its longest text.
TEXT_THREADS = 4
# Characters and token ids of prompts that are checked without a thread: 0.3 ms of tokenization.
MAX_QUICK_SIZE = 1024
# Guides that are compiled concurrently, each in its own process.
GUIDE_THREADS = 2

Result = TypeVar("Result")
# Maximum time from the request to the compiled guide.
MAX_COMPILE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The options of a service.

    ``max_queue`` requests may wait in addition to those that run. All requests use the draft of
    ``setting``, or no draft if they are ``exact``. ``names`` are the model's names; the first one
    is the label of metrics. At most ``max_logprobs`` most likely tokens are returned for each
    token. With ``trusts_templates`` a request may bring its own chat template. With
    ``forces_usage`` every stream has token counts, and with ``tokens_as_ids`` log-probabilities
    name tokens by their ids.
    """

    names: tuple[str, ...]
    max_queue: int = 256
    setting: DraftSetting = field(default_factory=DraftSetting)
    exact: bool = False
    max_logprobs: int = MAX_TOP_LOGPROBS
    trusts_templates: bool = False
    forces_usage: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True)
class Load:
    """The running and waiting requests, and the share of cache pages in use."""

    running: int
    waiting: int
    used_pages: float


def _is_quick(prompts: Sequence[Prompt], params: GenerateParams) -> bool:
    """Return whether the check of prompts takes less time than a change of threads."""
    if params.is_guided:
        return False
    sizes = [len(prompt.prompt or "") + len(prompt.prompt_ids or ()) for prompt in prompts]
    return sum(sizes) <= MAX_QUICK_SIZE and not any(prompt.messages for prompt in prompts)


def _resolve_later(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[list[TokenScore]],
    result: list[TokenScore] | BaseException,
) -> None:
    """Set the result of a future from the engine's thread."""
    # The loop is closed after shutdown; the scores have no receiver then.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(partial(_resolve, future, result))


def _resolve(
    future: asyncio.Future[list[TokenScore]], result: list[TokenScore] | BaseException
) -> None:
    """Set the result of a future that may be cancelled."""
    if future.cancelled():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class Service:
    """Generates outputs for any number of clients. It is created and used on one event loop."""

    def __init__(self, engine: Engine, options: ServiceOptions) -> None:
        self.engine = engine
        self.options = options
        self.metrics = Metrics(engine.manifest, options.names[0])
        engine.decoder.observe_launches(self.metrics.launched)
        self.started_s = int(time.time())
        self.is_draining = False
        self.generations: set[Generation] = set()
        self._bridge = Bridge()
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "specbuild-text")
        self._guide_threads = ThreadPoolExecutor(GUIDE_THREADS, "specbuild-guides")
        engine.isolate_guides()
        # A request that sets nothing: the server's temperature is not that of the command line.
        sampling = served_sampling({}, engine.generation_defaults.sampling)
        engine.session.prepare(options.setting, GenerateParams(sampling=sampling))
        self._num_open = 0
        self._failure: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        """The number of waiting and running requests."""
        return self._num_open

    @property
    def failure(self) -> str | None:
        """The engine's last error; None if a request has succeeded since."""
        return self._failure

    async def in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a slow call on texts in a thread, so that it does not delay the streams of other
        clients.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._text_threads, call, *arguments
        )

    async def check(self, prompts: Sequence[Prompt], params: GenerateParams) -> list[Request]:
        """Return the prompts as requests of the engine. ApiError if the engine rejects one."""
        params = replace(params, exact=True) if self.options.exact else params
        try:
            if _is_quick(prompts, params):
                return self.engine.check_prompts(prompts, params)
            return await self.in_thread(self.engine.check_prompts, prompts, params)
        except RequestError as error:
            raise engine_error(error) from error

    async def compile_guide(self, guide: Guide | None) -> Guide | None:
        """Compile a guide and return it. ApiError if it is invalid or takes too long.

        Compilation takes at most a few seconds of processor time, in its own threads.
        """
        if guide is None:
            return None
        future = self._guide_threads.submit(self.engine.compile, guide)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), MAX_COMPILE_S)
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
        """The maximum number of running and queued sequences."""
        return self.engine.manifest.limits.max_batch_size + self.options.max_queue

    def check_admission(self, sequences: int) -> None:
        """Raise ApiError if a call with this many sequences cannot be admitted now.

        The status is 400 if the call can never fit, 429 if it does not fit now, and 503 during
        shutdown. Routes call this before they tokenize prompts.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; use another server")
        if sequences > self.max_sequences:
            raise ApiError(
                400,
                f"the request has {sequences} sequences (prompts times n), but the server holds "
                f"at most {self.max_sequences} running and queued; split it into smaller requests",
                code="too_many_sequences",
            )
        if self._num_open + sequences > self.max_sequences:
            raise ApiError(
                429,
                f"{self._num_open} sequences are open and this request has {sequences}, but the "
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
        self._num_open += len(requests)
        self._idle.clear()
        self.generations.add(generation)
        generation.start(stream)
        return generation

    async def score(self, requests: Sequence[Request], num_top: int) -> list[list[TokenScore]]:
        """Return the scores of the prompts' tokens from the second on.

        Raises ApiError if the requests cannot be admitted or the engine cannot score.
        """
        self.check_admission(len(requests))
        self._num_open += len(requests)
        self._idle.clear()
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[list[TokenScore]]] = []
        cancels = []
        try:
            for request in requests:
                future = loop.create_future()
                futures.append(future)
                deliver = partial(_resolve_later, loop, future)
                cancels.append(self.engine.session.score(request.prompt_ids, num_top, deliver))
            scores = await asyncio.gather(*futures)
            self.metrics.scored(sum(len(request.prompt_ids) for request in requests))
            return scores
        except RequestError as error:
            raise engine_error(error, "prompt_logprobs") from error
        except Exception as error:
            self.record_failure(error)
            raise ApiError(503, f"the engine failed: {error}") from error
        finally:
            for cancel in cancels:
                cancel()
            self._num_open -= len(requests)
            if not self._num_open:
                self._idle.set()

    def release(self, requests: int) -> None:
        """Count requests as finished."""
        self._num_open -= requests
        if requests:
            self._failure = None
        if not self._num_open:
            self._idle.set()

    def record_failure(self, error: BaseException) -> None:
        """Store an error of the engine. The server is unhealthy until a request succeeds."""
        if not isinstance(error, RequestError):
            self._failure = f"{type(error).__name__}: {error}"

    @property
    def load(self) -> Load:
        """The load of the engine now."""
        running = min(self._num_open, self.engine.manifest.limits.max_batch_size)
        return Load(running, self._num_open - running, self.engine.used_pages)

    def exposed_metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
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
        """Let :meth:`drained` return although requests are open."""
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
