"""Functions that all routes share: model names, prompts, requests and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbuild.runtime.decode.scoring import TokenScore
from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.request import GenerateParams, Prompt, Request
from specbuild.runtime.serve.errors import ApiError, engine_error, invalid_value, unsupported
from specbuild.runtime.serve.fields import GenerationFields, StreamOptions, Urgency
from specbuild.runtime.serve.messages import count_calls, with_call_ids
from specbuild.runtime.serve.parsers.output_constraint import OutputConstraint
from specbuild.runtime.serve.parsers.output_formats import OutputFormat
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.service import Service
from specbuild.runtime.serve.token_batches import TokenBatches
from specbuild.runtime.text.codec import TextCodec, check_unicode

# Texts to tokenize may exceed the maximum sequence length by this factor, since their tokens may be
# truncated afterwards.
MAX_TOKENIZED_SEQUENCES = 8


@dataclass(frozen=True, kw_only=True)
class ChatPromptOptions:
    """Options for rendering a chat as a prompt, named after the request fields.

    A prompt that ``may_be_long`` may exceed the context, since it is truncated later. ``template``
    replaces the chat template.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    may_be_long: bool = False
    template: str | None = None

    @classmethod
    def of(
        cls,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        *,
        add_special_tokens: bool,
        may_be_long: bool = False,
        template: str | None = None,
    ) -> ChatPromptOptions:
        """Return the options of a request's fields. ApiError if two contradict each other."""
        if continue_final_message and add_generation_prompt:
            raise invalid_value(
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
            template=template,
        )


NEW_TURN = ChatPromptOptions()
# Template variables with request fields of their own. chat_template_kwargs must not set them.
_OWN_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


class Serving:
    """A service with the format of its outputs, which is None without a tokenizer."""

    def __init__(self, service: Service, output_format: OutputFormat | None) -> None:
        self.service = service
        self.output_format = output_format

    @property
    def has_tokenizer(self) -> bool:
        """Whether the engine has a tokenizer."""
        return self.service.engine.text is not None

    @property
    def codec(self) -> TextCodec:
        """The engine's tokenizer. ApiError if it has none."""
        if self.service.engine.text is None:
            raise ApiError(400, "the engine has no tokenizer: give token ids to /v1/completions")
        return self.service.engine.text

    def model(self, name: str | None) -> str:
        """Return the name of a model, by default the first. ApiError if the server has it not."""
        names = self.service.options.names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server serves {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def requests(
        self,
        prompts: Sequence[Prompt],
        choice_params: Sequence[GenerateParams],
        *,
        may_shorten: bool = False,
    ) -> list[Request]:
        """Return a request for each choice of each prompt, in this order.

        Choices differ in their sampling only. Raises ApiError if the engine rejects a request.
        Unless ``may_shorten``, it is also raised if the new tokens exceed the context.
        """
        checked_requests = await self.service.check(prompts, replace(choice_params[0], raw=True))
        if not may_shorten:
            self._check_length(checked_requests, choice_params[0].max_new_tokens)
        return [
            replace(request, id=f"{request.id}.{i}", params=_with_sampling(request.params, params))
            for request in checked_requests
            for i, params in enumerate(choice_params)
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

    async def guide(self, constraint: OutputConstraint | None, prompt: ChatPrompt) -> Guide | None:
        """Return the compiled guide of a complete output that continues ``prompt``.

        Raises ApiError if the guide is invalid or takes too long to compile.
        """
        if constraint is None or self.output_format is None:
            return None
        try:
            guide = self.output_format.guide(constraint, prompt)
        except RequestError as error:
            raise engine_error(error) from error
        return await self.service.compile_guide(guide)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        options: ChatPromptOptions = NEW_TURN,
    ) -> ChatPrompt:
        """Return the chat, rendered and tokenized. RequestError if the template fails."""
        codec = self.codec if options.template is None else self._with_template(options.template)
        for name in _OWN_VARIABLES:
            if variables.get(name) is not None:
                raise invalid_value(
                    f"chat_template_kwargs.{name}",
                    f"chat_template_kwargs has {name}, which is a field of the request itself",
                )
        if self.output_format is not None and self.output_format.call_id is not None:
            messages = with_call_ids(messages, self.output_format.call_id)
        max_tokens = self.max_seq_len * (MAX_TOKENIZED_SEQUENCES if options.may_be_long else 1)

        def render() -> ChatPrompt:
            text = codec.render(
                messages,
                tools=tools,
                variables=variables,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
            )
            special = options.add_special_tokens
            ids = codec.encode_rendered(text, most_tokens=max_tokens, add_special_tokens=special)
            continued = messages[-1]["content"] if options.continue_final_message else ""
            return ChatPrompt(text, ids, continued, num_past_calls=count_calls(messages))

        return await self.service.in_thread(render)

    def _with_template(self, source: str) -> TextCodec:
        """Return the tokenizer with a request's template. ApiError if it must not have one."""
        if not self.service.options.trusts_templates:
            raise unsupported(
                "chat_template",
                "start the server with --chat-template FILE or --trust-request-chat-template",
            )
        try:
            codec = self.codec.with_template(source)
            codec.check_template()
        except EngineFileError as error:
            raise invalid_value("chat_template", f"chat_template: {error}") from error
        return codec

    def reasoning_budget(self, tokens: int | None, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return the limit of ``thinking_token_budget``, where null and -1 are none.

        Raises ApiError if the format of outputs has no reasoning.
        """
        if tokens is None or tokens == -1:
            return None
        budget = None
        if self.output_format is not None:
            budget = self.output_format.reasoning_budget(tokens, prompt)
        if budget is None:
            raise unsupported(
                "thinking_token_budget", "this model has no markers of reasoning; set max_tokens"
            )
        return budget

    async def prompt_scores(
        self, requests: Sequence[Request], num_top: int | None
    ) -> list[list[TokenScore]]:
        """Return the scores of the prompts' tokens from the second on; none if ``num_top`` is None.

        Raises ApiError if ``num_top`` is out of range, or if the engine cannot score.
        """
        if num_top is None:
            return []
        return await self.service.score(requests, num_top)

    def top_logprobs(self, name: str, value: int | None) -> int:
        """Return how many most likely tokens a field requests. ApiError if out of range."""
        value, maximum = value or 0, self.service.options.max_logprobs
        if not 0 <= value <= maximum:
            raise invalid_value(name, f"{name} is {value}, must be 0 to {maximum}")
        return value

    def usage_options(self, body: GenerationFields) -> StreamOptions:
        """Return which chunks of a stream have token counts. ApiError without a stream.

        If the server forces counts, all chunks of a request without ``stream_options`` have them.
        """
        options = body.usage_options
        if not self.service.options.forces_usage:
            return options
        continuous = body.stream_options is None or options.continuous_usage_stats
        return StreamOptions(include_usage=True, continuous_usage_stats=continuous)

    async def text_ids(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text. RequestError if the text is far too long."""
        check_unicode(text, "prompt")
        encode = partial(
            self.codec.encode,
            raw=True,
            most_tokens=MAX_TOKENIZED_SEQUENCES * self.max_seq_len,
            add_special_tokens=add_special_tokens,
        )
        return await self.service.in_thread(encode, text)

    @property
    def max_seq_len(self) -> int:
        """The maximum number of tokens of a sequence, prompt and output together."""
        return self.service.engine.manifest.limits.max_seq_len

    def start(
        self,
        requests: Sequence[Request],
        urgency: Urgency,
        *,
        splits_by_source: bool = False,
        generates: bool = True,
    ) -> TokenBatches:
        """Start requests, unless they do not generate. ApiError if they cannot be admitted."""
        if not generates:
            return TokenBatches(None, num_choices=len(requests))
        priority, deadline_s = urgency
        if priority or deadline_s is not None:
            requests = [replace(r, priority=priority, deadline_s=deadline_s) for r in requests]
        return TokenBatches(self.service.generate(requests), splits_by_source=splits_by_source)

    def hidden_end_tokens(self, params: GenerateParams) -> frozenset[int]:
        """Return the tokens that end an output and whose text is omitted."""
        if params.include_stop_str_in_output or self.output_format is None:
            return frozenset()
        eos = () if params.ignore_eos else self.service.engine.manifest.target.eos_token_ids
        return frozenset((*params.stop_token_ids, *eos)).difference(
            self.output_format.stop_token_ids
        )

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty without a tokenizer."""
        return self.codec.decode(ids) if self.has_tokenizer else ""


def _with_sampling(params: GenerateParams, choice: GenerateParams) -> GenerateParams:
    """Return the parameters with the sampling of a choice."""
    if params.sampling is choice.sampling:
        return params
    return replace(params, sampling=choice.sampling)
