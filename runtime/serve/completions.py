"""``/v1/completions``: continues prompts of text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specbuild.runtime.decode.scoring import TokenScore
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Prompt, Request, TokenEvent
from specbuild.runtime.serve.errors import engine_error, invalid_value, unsupported
from specbuild.runtime.serve.event_stream import EventSource, EventStream, TextEvent
from specbuild.runtime.serve.fields import StreamOptions, TextFields
from specbuild.runtime.serve.request_fields import JsonList, RouteName
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.token_batches import (
    TokenBatch,
    collect_outputs,
    source_fields,
)
from specbuild.runtime.serve.token_logprobs import TokenTexts, joined_logprobs
from specbuild.runtime.serve.usage import response_head, usage

MAX_PROMPTS = 1024
# OpenAI's default of max_tokens for completions.
DEFAULT_MAX_TOKENS = 16


class CompletionFields(TextFields):
    """The body of a completion."""

    route: ClassVar[RouteName] = "completions"
    prompt: str | JsonList[int] | JsonList[str] | JsonList[JsonList[int]]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """See :class:`TextFields`."""
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts in order. ApiError if one is empty or there are too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [self._prompt(prompt, "0")]
        if prompt and isinstance(prompt[0], int):
            return [self._prompt(prompt, "0")]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise invalid_value(
                "prompt", f"prompt has {len(prompt)} entries, must be 1 to {MAX_PROMPTS}"
            )
        return [self._prompt(entry, str(i)) for i, entry in enumerate(prompt)]

    @staticmethod
    def _prompt(content: Any, prompt_id: str) -> Prompt:
        """Return a prompt of text or token ids, whose types pydantic has checked."""
        if not content:
            raise invalid_value("prompt", "prompt is empty; give text or token ids")
        if isinstance(content, str):
            return Prompt(prompt_id, prompt=content)
        return Prompt(prompt_id, prompt_ids=tuple(content))

    def check(self) -> None:
        """Raise ApiError for unsupported values and for fields that contradict each other."""
        if self.best_of is not None and self.best_of != self.num_choices:
            raise unsupported("best_of", "request n choices and select one in the client")
        if self.thinking_token_budget not in (None, -1):
            raise unsupported("thinking_token_budget", "use chat completions")


class Completions:
    """Handles completions."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: CompletionFields) -> Mapping[str, Any] | EventStream:
        """Return the answer, or the chunks of a stream."""
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        usage_options, prompts = serving.usage_options(body), body.prompts
        num_prompt_logprobs = _checked(serving, "prompt_logprobs", body.num_prompt_logprobs)
        splits_by_source = body.splits_by_source
        serving.service.check_admission(len(prompts) * body.num_choices)
        if body.truncate_prompt_tokens is not None or not body.add_special_tokens:
            prompts = [await self._tokenized(prompt, body) for prompt in prompts]
        guide = await serving.service.compile_guide(body.guide())
        choice_params = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.engine_token_limit,
            with_text=serving.has_tokenizer,
            num_top_logprobs=_checked(serving, "logprobs", body.logprobs),
            guide=guide,
        )
        may_shorten = body.max_tokens is None or "max_tokens" not in body.model_fields_set
        requests = await serving.requests(prompts, choice_params, may_shorten=may_shorten)
        head = response_head("cmpl", "text_completion", model, body.request_id)
        scores = await serving.prompt_scores(requests[:: body.num_choices], num_prompt_logprobs)
        prompt_parts = [
            await self._prompt_part(body, request, scores[i] if scores else None)
            for i, request in enumerate(requests[:: body.num_choices])
        ]
        choices = [
            _Choice(serving, body, i, request, prompt_parts[i // body.num_choices])
            for i, request in enumerate(requests)
        ]
        batches = serving.start(
            requests,
            body.urgency,
            splits_by_source=splits_by_source,
            generates=body.generates,
        )
        if body.stream:
            return EventStream(
                batches, _CompletionEvents(choices, head, usage_options, body.num_choices)
            )
        outputs = await collect_outputs(batches, len(requests))
        choice_objects = [
            {"token_ids": None, "prompt_token_ids": None} | choice.choice_object(batch)
            for choice, batch in zip(choices, outputs, strict=True)
        ]
        return head | {"choices": choice_objects, "usage": _usage(choices, body.num_choices)}

    async def _tokenized(self, prompt: Prompt, body: CompletionFields) -> Prompt:
        """Return the prompt as its truncated token ids. ApiError if it cannot be tokenized."""
        serving, ids = self._serving, prompt.prompt_ids
        if ids is None:
            try:
                ids = await serving.text_ids(prompt.prompt or "", body.add_special_tokens)
            except RequestError as error:
                raise engine_error(error, "prompt") from error
        kept_ids = body.truncated(ids, max_seq_len=serving.max_seq_len, max_tokens=body.max_tokens)
        if not kept_ids:
            raise invalid_value("prompt", "prompt has no tokens; give more text")
        return Prompt(prompt.id, prompt_ids=kept_ids)

    async def _prompt_part(
        self, body: CompletionFields, request: Request, scores: Sequence[TokenScore] | None
    ) -> _PromptPart:
        """Return what an answer contains of the prompt."""
        if not body.echo and scores is None:
            return _NO_PROMPT_PART
        serving, ids = self._serving, request.prompt_ids
        texts = TokenTexts(serving, as_ids=bool(body.return_tokens_as_token_ids))

        def part() -> _PromptPart:
            text = serving.text_of(ids) if body.echo else ""
            logprobs = prompt_logprobs = None
            if scores is not None and body.echo and body.logprobs is not None:
                logprobs = texts.prompt_completion_logprobs(ids[0], scores)
            if scores is not None and body.prompt_logprobs is not None:
                prompt_logprobs = texts.prompt_logprobs(scores)
            return _PromptPart(text, logprobs, prompt_logprobs)

        return await serving.service.in_thread(part)


@dataclass(frozen=True)
class _PromptPart:
    """What the first chunk of a choice contains of the prompt."""

    text: str = ""
    logprobs: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None = None


_NO_PROMPT_PART = _PromptPart()


class _Choice:
    """One output of a completion, and how much of it was returned."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionFields,
        index: int,
        request: Request,
        prompt_part: _PromptPart,
    ) -> None:
        self._serving = serving
        self._texts = TokenTexts(serving, as_ids=bool(body.return_tokens_as_token_ids))
        self._prompt_part = prompt_part
        self._body = body
        self._index = index
        self.request = request
        self.tokens = 0
        self.cached_tokens = 0
        self._offset = len(prompt_part.text)
        self._has_begun = False

    def text_event(self, head: Mapping[str, Any]) -> TextEvent | None:
        """Return the event of all chunks of a stream but the first and the last.

        None if they differ in more than their text.
        """
        body = self._body
        if body.logprobs is not None or body.return_draft_tokens or body.return_token_ids:
            return None
        return TextEvent(lambda text: {**head, "choices": [self._object(text, None)]})

    def choice_object(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the choice object of a batch. The first one starts with that of the prompt."""
        body, text = self._body, _text(batch)
        logprobs = None if body.logprobs is None else self._logprobs(batch)
        choice = self._object(text, batch.finish_reason, logprobs)
        if not self._has_begun:
            self._has_begun = True
            # The first token has the number.
            self.cached_tokens = sum(token.cached_tokens for token in batch.tokens)
            prompt = self._prompt_part
            choice |= {"text": prompt.text + text, "prompt_logprobs": prompt.prompt_logprobs}
            if prompt.logprobs is not None and logprobs is not None:
                choice["logprobs"] = joined_logprobs(prompt.logprobs, logprobs)
        self.tokens += len(batch.tokens)
        if body.return_draft_tokens:
            choice |= source_fields(batch.tokens)
        if body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in batch.tokens]
            choice["prompt_token_ids"] = list(self.request.prompt_ids)
        return choice

    def _object(
        self, text: str, finish_reason: str | None, logprobs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, batch: TokenBatch) -> dict[str, Any]:
        logprobs = self._texts.completion_logprobs(batch.tokens, offset=self._offset)
        self._offset += sum(len(self._serving.text_of([t.token_id])) for t in batch.tokens)
        return logprobs


class _CompletionEvents(EventSource):
    """The chunks of a streamed completion."""

    def __init__(
        self,
        choices: Sequence[_Choice],
        head: Mapping[str, Any],
        usage_options: StreamOptions,
        num_choices: int,
    ) -> None:
        self._choices = choices
        self._head = head
        self._usage_options = usage_options
        self._num_choices = num_choices
        self._counts_usage = usage_options.include_usage and usage_options.continuous_usage_stats
        # By choice, from its second chunk on.
        self._text_events: dict[int, TextEvent | None] = {}

    def begin(self) -> Sequence[Mapping[str, Any]]:
        """Return nothing: the status tells whether the engine accepted the request."""
        return ()

    def add(self, batch: TokenBatch) -> Iterator[Mapping[str, Any]]:
        """Yield the chunk of a batch."""
        choice = self._choices[batch.choice]
        chunk = {**self._head, "choices": [choice.choice_object(batch)]}
        if self._counts_usage:
            chunk["usage"] = _usage([choice], 1)
        yield chunk

    def end(self) -> Iterator[Mapping[str, Any]]:
        """Yield the token counts, if they were requested."""
        if self._usage_options.include_usage:
            counts = _usage(self._choices, self._num_choices)
            yield {**self._head, "choices": [], "usage": counts}

    def encoded_token(self, token: TokenEvent) -> bytes:
        """Return the event of a token that does not end its output."""
        text_event = self._text_events.get(token.request)
        if text_event is None:
            return super().encoded_token(token)
        self._choices[token.request].tokens += 1
        return text_event.with_text(token.text)

    def encoded(self, batch: TokenBatch) -> bytes:
        """Return the event of a batch."""
        text_event = self._text_events.get(batch.choice)
        if text_event is not None and batch.finish_reason is None:
            self._choices[batch.choice].tokens += len(batch.tokens)
            return text_event.with_text(_text(batch))
        if batch.choice not in self._text_events and not self._counts_usage:
            self._text_events[batch.choice] = self._choices[batch.choice].text_event(self._head)
        return super().encoded(batch)


def _text(batch: TokenBatch) -> str:
    tokens = batch.tokens
    return tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])


def _checked(serving: Serving, name: str, value: int | None) -> int | None:
    """Return a number of most likely tokens. ApiError if it is out of range."""
    return None if value is None else serving.top_logprobs(name, value)


def _usage(choices: Sequence[_Choice], num_choices: int) -> dict[str, Any]:
    """Return the token counts. A prompt with several choices counts once."""
    prompt_tokens = sum(len(choice.request.prompt_ids) for choice in choices[::num_choices])
    cached_tokens = sum(choice.cached_tokens for choice in choices[::num_choices])
    return usage(prompt_tokens, sum(choice.tokens for choice in choices), cached=cached_tokens)
