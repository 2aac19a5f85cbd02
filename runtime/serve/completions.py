"""``/v1/completions``: prompts as text or ids, one output for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Prompt, Request
from specbuild.runtime.serve.errors import engine_refuses, not_offered, refused
from specbuild.runtime.serve.fields import StreamOptions, TextFields
from specbuild.runtime.serve.http import Chunks
from specbuild.runtime.serve.request_fields import Listed, Route
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.token_logprobs import completion_logprobs, top_logprobs
from specbuild.runtime.serve.turns import Turn, Turns, merged, source
from specbuild.runtime.serve.usage import answer_head, usage

MOST_PROMPTS = 1024
# What OpenAI's API emits where a completion names no number.
DEFAULT_MAX_TOKENS = 16


class CompletionFields(TextFields):
    """The body of a completion."""

    route: ClassVar[Route] = "completions"
    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in their order. ApiError where one is empty, or there are too many."""
        given = self.prompt
        if isinstance(given, str):
            return [self._prompt(given, "0")]
        if given and isinstance(given[0], int):
            return [self._prompt(given, "0")]
        if not 1 <= len(given) <= MOST_PROMPTS:
            raise refused("prompt", f"prompt has {len(given)} entries, must be 1 to {MOST_PROMPTS}")
        return [self._prompt(entry, str(i)) for i, entry in enumerate(given)]

    @staticmethod
    def _prompt(given: Any, name: str) -> Prompt:
        """Text, or ids; pydantic has seen to their types."""
        if not given:
            raise refused("prompt", "prompt is empty; give text or token ids")
        if isinstance(given, str):
            return Prompt(name, prompt=given)
        return Prompt(name, prompt_ids=tuple(given))

    def check(self) -> None:
        """ApiError for what is not offered, and for what contradicts itself."""
        if self.best_of is not None and self.best_of != self.choices:
            raise not_offered("best_of", "ask for n choices and take the best")
        if self.logprobs is not None and self.echo:
            raise not_offered("echo", "log-probabilities are those of outputs: leave one out")


class Completions:
    """The route, over a server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: CompletionFields) -> Mapping[str, Any] | Chunks:
        """A completion, or the chunks of one."""
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        with_usage, prompts = body.streamed_usage, body.prompts
        by_source = body.by_source
        serving.service.check_admission(len(prompts) * body.choices)
        if body.truncate_prompt_tokens is not None or not body.add_special_tokens:
            prompts = [await self._tokenized(prompt, body) for prompt in prompts]
        guide = await serving.service.compiled(body.guide())
        each = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.max_tokens,
            text=serving.has_text,
            likeliest=None if body.logprobs is None else top_logprobs("logprobs", body.logprobs),
            guide=guide,
        )
        may_clip = body.max_tokens is None or "max_tokens" not in body.model_fields_set
        requests = await serving.requests(prompts, each, raw=True, may_clip=may_clip)
        head = answer_head("cmpl", "text_completion", model, body.request_id)
        choices = [_Choice(serving, body, i, r) for i, r in enumerate(requests)]
        turns = serving.turns(requests, body.urgency, by_source=by_source)
        if body.stream:
            return self._stream(turns, choices, head, with_usage, body.choices)
        whole = await merged(turns, len(requests))
        shown = [choice.of(turn) for choice, turn in zip(choices, whole, strict=True)]
        return head | {"choices": shown, "usage": _usage(choices, body.choices)}

    async def _tokenized(self, prompt: Prompt, body: CompletionFields) -> Prompt:
        """A prompt as the ids that are left of it. ApiError where it cannot be read."""
        serving, ids = self._serving, prompt.prompt_ids
        if ids is None:
            try:
                ids = await serving.text_ids(prompt.prompt or "", body.add_special_tokens)
            except RequestError as error:
                raise engine_refuses(error, "prompt") from error
        kept = body.truncated(ids, max_seq_len=serving.max_seq_len, max_tokens=body.max_tokens)
        if not kept:
            raise refused("prompt", "prompt has no tokens; give more text")
        return Prompt(prompt.id, prompt_ids=kept)

    async def _stream(
        self,
        turns: Turns,
        choices: Sequence[_Choice],
        head: Mapping[str, Any],
        with_usage: StreamOptions,
        each: int,
    ) -> Chunks:
        async with aclosing(turns):
            async for turn in turns:
                choice = choices[turn.choice]
                chunk = {**head, "choices": [choice.of(turn)]}
                if with_usage.continuous_usage_stats:
                    chunk["usage"] = _usage([choice], 1)
                yield chunk
        if with_usage.include_usage:
            yield {**head, "choices": [], "usage": _usage(choices, each)}


class _Choice:
    """One output, as far as it was shown."""

    def __init__(
        self, serving: Serving, body: CompletionFields, index: int, request: Request
    ) -> None:
        self._serving = serving
        self._body = body
        self._index = index
        self.request = request
        self.tokens = 0
        self.cached_tokens = 0
        self._offset = 0
        self._begun = False

    def of(self, turn: Turn) -> dict[str, Any]:
        """What a turn adds to it; the first one has the prompt where it is wanted."""
        body, text = self._body, "".join(token.text for token in turn.tokens)
        if body.echo and not self._begun:
            text = self._serving.text_of(self.request.prompt_ids) + text
        self._begun = True
        self.tokens += len(turn.tokens)
        self.cached_tokens += sum(token.cached_tokens for token in turn.tokens)
        shown: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None if body.logprobs is None else self._logprobs(turn),
            "finish_reason": turn.finish_reason,
        }
        if body.return_draft_tokens:
            shown |= source(turn.tokens)
        if body.return_token_ids:
            shown["token_ids"] = [token.token_id for token in turn.tokens]
            shown["prompt_token_ids"] = list(self.request.prompt_ids)
        return shown

    def _logprobs(self, turn: Turn) -> dict[str, Any]:
        shown = completion_logprobs(
            self._serving, turn.tokens, offset=self._offset, likeliest=bool(self._body.logprobs)
        )
        self._offset += sum(map(len, shown["tokens"]))
        return shown


def _usage(choices: Sequence[_Choice], each: int) -> dict[str, Any]:
    """Each prompt counts once, however many choices it has: they follow each other."""
    read = sum(len(choice.request.prompt_ids) for choice in choices[::each])
    cached = sum(choice.cached_tokens for choice in choices[::each])
    return usage(read, sum(choice.tokens for choice in choices), cached=cached)
