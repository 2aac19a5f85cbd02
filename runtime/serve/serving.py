"""What every route needs of the server: its models, its requests and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams, Prompt, Request
from specbuild.runtime.serve.errors import ApiError, engine_refuses, refused
from specbuild.runtime.serve.fields import Urgency
from specbuild.runtime.serve.messages import count_calls, with_call_ids
from specbuild.runtime.serve.parsers.asked_form import AskedForm
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.parsers.registry import ParserForm
from specbuild.runtime.serve.service import Service
from specbuild.runtime.serve.turns import Turns
from specbuild.runtime.text.codec import TextCodec, check_unicode

# Clients that cut a text ask for its tokens first: it may be this many times the longest sequence.
MOST_SEQUENCES_COUNTED = 8


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """How a chat becomes a prompt; see the fields of a request with these names.

    A prompt that ``may_be_long`` is truncated afterwards.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    may_be_long: bool = False

    @classmethod
    def of(
        cls,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        *,
        add_special_tokens: bool,
        may_be_long: bool = False,
    ) -> PromptForm:
        """Return the form that a request's fields state. ApiError where two contradict."""
        if continue_final_message and add_generation_prompt:
            raise refused(
                "continue_final_message",
                "continue_final_message continues a message and add_generation_prompt begins one: "
                "leave one out",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        return cls(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            may_be_long=may_be_long,
        )


NEW_TURN = PromptForm()
# What a template gets from fields of the request, never from chat_template_kwargs.
_OWN_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


class Serving:
    """A service with the form of its outputs; None where the engine has no tokenizer."""

    def __init__(self, service: Service, form: ParserForm | None) -> None:
        self.service = service
        self.form = form

    @property
    def has_text(self) -> bool:
        """Whether the engine has a tokenizer."""
        return self.service.engine.text is not None

    @property
    def codec(self) -> TextCodec:
        """The engine's tokenizer. ApiError where it has none."""
        if self.service.engine.text is None:
            raise ApiError(400, "the engine has no tokenizer: give token ids to /v1/completions")
        return self.service.engine.text

    def model(self, asked: str) -> str:
        """The name of a model. ApiError where it is another one's."""
        names = self.service.options.names
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    async def requests(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[GenerateParams],
        *,
        raw: bool,
        may_clip: bool = False,
    ) -> list[Request]:
        """Requests for each choice of each prompt, in this order. ApiError where one is refused.

        Choices differ in how they sample alone. A number of new tokens that does not fit behind a
        prompt is refused too, unless ``may_clip``.
        """
        checked = await self.service.check(prompts, replace(each[0], raw=raw))
        if not may_clip:
            self._check_length(checked, each[0].max_new_tokens)
        return [
            replace(
                request,
                id=f"{request.id}.{i}",
                params=replace(request.params, sampling=params.sampling),
            )
            for request in checked
            for i, params in enumerate(each)
        ]

    def _check_length(self, requests: Sequence[Request], new_tokens: int) -> None:
        """Raise ApiError if a prompt and its new tokens exceed the context."""
        limit = self.max_seq_len
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + new_tokens > limit:
            raise ApiError(
                400,
                f"the context has {limit} tokens, but the request needs {longest + new_tokens}: "
                f"{longest} in the prompt and {new_tokens} in the completion; shorten the prompt, "
                "lower max_tokens, or set it to null for as many as fit",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def guide(self, asked: AskedForm | None, prompt: ChatPrompt) -> Guide | None:
        """The guide of a full output that continues ``prompt``, compiled. ApiError."""
        if asked is None or self.form is None:
            return None
        try:
            guide = self.form.guided(asked, prompt)
        except RequestError as error:
            raise engine_refuses(error) from error
        return await self.service.compiled(guide)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        form: PromptForm = NEW_TURN,
    ) -> ChatPrompt:
        """The chat, rendered and tokenized. RequestError where the template refuses it."""
        codec = self.codec
        for name in _OWN_VARIABLES:
            if variables.get(name) is not None:
                raise refused(
                    f"chat_template_kwargs.{name}",
                    f"chat_template_kwargs has {name}, which is a field of the request itself",
                )
        if self.form is not None and self.form.call_id is not None:
            messages = with_call_ids(messages, self.form.call_id)
        most = self.max_seq_len * (MOST_SEQUENCES_COUNTED if form.may_be_long else 1)

        def rendered() -> ChatPrompt:
            text = codec.render(
                messages,
                tools=tools,
                variables=variables,
                add_generation_prompt=form.add_generation_prompt,
                continue_final_message=form.continue_final_message,
            )
            special = form.add_special_tokens
            ids = codec.encode_rendered(text, most_tokens=most, add_special_tokens=special)
            continued = messages[-1]["content"] if form.continue_final_message else ""
            return ChatPrompt(text, ids, continued, num_past_calls=count_calls(messages))

        return await self.service.in_thread(rendered)

    async def text_ids(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text. RequestError where it is so long that no part could be meant."""
        check_unicode(text, "prompt")
        encode = partial(
            self.codec.encode,
            raw=True,
            most_tokens=MOST_SEQUENCES_COUNTED * self.max_seq_len,
            add_special_tokens=add_special_tokens,
        )
        return await self.service.in_thread(encode, text)

    @property
    def max_seq_len(self) -> int:
        """Tokens of the engine's longest sequence, prompt and output together."""
        return self.service.engine.manifest.limits.max_seq_len

    def turns(
        self, requests: Sequence[Request], urgency: Urgency, *, by_source: bool = False
    ) -> Turns:
        """Starts requests. ApiError where the server takes no more, or they come too late."""
        priority, deadline_s = urgency
        given = [replace(r, priority=priority, deadline_s=deadline_s) for r in requests]
        return Turns(self.service.generate(given), by_source=by_source)

    def hidden_ends(self, params: GenerateParams) -> frozenset[int]:
        """Return the tokens that end a chat without being part of its text."""
        if params.include_stop_str_in_output or self.form is None:
            return frozenset()
        eos = () if params.ignore_eos else self.service.engine.manifest.target.eos_token_ids
        return frozenset((*params.stop_token_ids, *eos)).difference(self.form.stop_token_ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens; empty where there is no tokenizer."""
        return self.codec.decode(ids) if self.has_text else ""
