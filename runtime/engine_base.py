"""What an engine offers beside requests: short forms of generation, its tokenizer, closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from specbuild.runtime.decode.decoder import DraftSetting, Speculation
from specbuild.runtime.decode.session import EventBatch, Session
from specbuild.runtime.draft.drafter import Drafter
from specbuild.runtime.draft.registry import AUTO
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor, Executor
from specbuild.runtime.request import (
    DEFAULT_PARAMS,
    Event,
    FinishEvent,
    GenerateParams,
    Prompt,
    Prompts,
    Request,
)
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.engine_tokenizer import EngineTokenizer

# A step that is in flight ends first.
_CLOSE_TIMEOUT_S = 60.0
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]


class EngineBase(ABC):
    """Methods of an engine for one prompt, its tokenizer and its end.

    ``parameters`` are keywords of GenerateParams. They change ``params``, or
    :attr:`default_params` where these are None. ``speculation`` and ``drafter`` are those of
    ``generate``. All raise RequestError for what the engine cannot serve.

    An engine is a context manager: at its end it is closed.
    """

    path: Path | None = None
    manifest: Manifest
    executor: Executor | DeviceExecutor
    text: TextCodec | None
    session: Session
    generation_defaults: GenerationDefaults
    _is_closed = False

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The engine's tokenizer; RequestError where it has none."""
        if self.text is None:
            raise RequestError("the engine has no tokenizer: its prompts are token ids")
        return EngineTokenizer(self.text, self.manifest.target.vocab)

    def close(self) -> None:
        """End all requests, and release the memory of weights and caches.

        What still runs gets its last event, with the reason ``abort``. The engine takes no
        requests after this.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.session.abort().wait(_CLOSE_TIMEOUT_S)
        self.session.join(_CLOSE_TIMEOUT_S)
        self.close_guides()
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        manifest, limits = self.manifest, self.manifest.limits
        where = "" if self.path is None else f" {self.path}"
        kinds = ", ".join(drafter.kind for drafter in manifest.drafters) or "none"
        return (
            f"<Engine{where}: {manifest.target.model_type} for {manifest.backend}, drafters: "
            f"{kinds}, {limits.max_batch_size} sequences of {limits.max_seq_len} tokens"
            f"{', closed' if self._is_closed else ''}>"
        )

    @property
    def default_params(self) -> GenerateParams:
        """Parameters with the sampling that the checkpoint recommends."""
        defaults = self.generation_defaults
        most = defaults.max_new_tokens or DEFAULT_PARAMS.max_new_tokens
        return GenerateParams(max_new_tokens=most, **defaults.sampling)

    @abstractmethod
    def check_prompts(
        self, prompts: Prompts, params: GenerateParams | Sequence[GenerateParams] | None = None
    ) -> list[Request]:
        """The prompts as requests."""

    @abstractmethod
    def decode(
        self,
        requests: Sequence[Request],
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
    ) -> Iterator[Event]:
        """The events of checked requests."""

    @abstractmethod
    def close_guides(self) -> None:
        """End the processes that compile and follow guides."""

    def generate_text(
        self,
        prompt: str | Prompt,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> str:
        """Return the text that follows a prompt.

        >>> text = engine.generate_text("def area(radius):", max_new_tokens=8)
        >>> engine.generate_text("def area(radius):", max_new_tokens=8, speculation=None) == text
        True
        """
        self._require_text()
        events = self.stream(prompt, params, speculation=speculation, drafter=drafter, **parameters)
        return _text_of(list(events))

    def chat(
        self,
        messages: Messages,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> str:
        """Return the assistant's answer to a chat: its messages, or one message of the user.

        >>> answer = engine.chat("Name a prime number.", max_new_tokens=8)
        >>> question = [{"role": "user", "content": "Name a prime number."}]
        >>> engine.chat(question, max_new_tokens=8) == answer
        True
        """
        return self.generate_text(
            _chat_prompt(messages), params, speculation=speculation, drafter=drafter, **parameters
        )

    def stream(
        self,
        prompt: str | Prompt,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> Iterator[Event]:
        """Return the events of a prompt: a TokenEvent for each token, then a FinishEvent.

        The request is checked at once, and starts with the first event that is read. Closing the
        iterator aborts it.

        >>> *tokens, finish = engine.stream("def area(radius):", max_new_tokens=8)
        >>> len(tokens), finish.record.finish_reason
        (8, 'length')
        """
        requests = self._requests(prompt, params, parameters)
        return self.decode(requests, speculation=speculation, drafter=drafter)

    async def generate_text_async(
        self,
        prompt: str | Prompt,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> str:
        """Return the text that follows a prompt, without blocking the event loop.

        >>> import asyncio
        >>> first = engine.generate_text_async("def area(radius):", max_new_tokens=8)
        >>> asyncio.run(first) == engine.generate_text("def area(radius):", max_new_tokens=8)
        True
        """
        self._require_text()
        events = self.stream_async(
            prompt, params, speculation=speculation, drafter=drafter, **parameters
        )
        return _text_of([event async for event in events])

    async def chat_async(
        self,
        messages: Messages,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> str:
        """Return the assistant's answer to a chat, without blocking the event loop."""
        return await self.generate_text_async(
            _chat_prompt(messages), params, speculation=speculation, drafter=drafter, **parameters
        )

    async def stream_async(
        self,
        prompt: str | Prompt,
        params: GenerateParams | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
        **parameters: Any,
    ) -> AsyncIterator[Event]:
        """Yield the events of a prompt on the running event loop, as ``stream`` does.

        Requests of several tasks are decoded together. Leaving the loop early aborts the request.
        """
        import asyncio  # An import of the runtime would take 7 % longer, and few use it.

        requests = self._requests(prompt, params, parameters)
        loop, batches = asyncio.get_running_loop(), asyncio.Queue[EventBatch]()

        def deliver(batch: EventBatch) -> None:
            if not loop.is_closed():  # else nobody waits for the end of an aborted request
                loop.call_soon_threadsafe(batches.put_nowait, batch)

        stream = self.session.add(requests, DraftSetting(speculation, drafter), deliver)
        finished = False
        try:
            while not finished:
                batch = await batches.get()
                if isinstance(batch, BaseException):
                    finished = True
                    raise batch
                for event in batch:
                    finished = isinstance(event, FinishEvent)
                    yield event
        finally:
            if not finished:
                stream.abort()

    def _requests(
        self, prompt: str | Prompt, params: GenerateParams | None, parameters: dict[str, Any]
    ) -> list[Request]:
        if not isinstance(prompt, str | Prompt):
            raise RequestError(
                f"prompt is of type {type(prompt).__name__}, must be a string or a Prompt; "
                "generate takes several prompts"
            )
        base = self.default_params if params is None else params
        return self.check_prompts(prompt, replace(base, **parameters) if parameters else base)

    def _require_text(self) -> None:
        if self.text is None:
            raise RequestError("the engine has no tokenizer: generate gives token ids")


def _chat_prompt(messages: Messages) -> Prompt:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return Prompt(messages=messages)  # type: ignore[arg-type]


def _text_of(events: list[Event]) -> str:
    """The text of a request that has finished."""
    finish = events[-1]
    assert isinstance(finish, FinishEvent)
    return finish.record.text or ""
