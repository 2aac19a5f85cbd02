"""``/v1/chat/completions``: answers chats with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Prompt, Request
from specbuild.runtime.serve.chat_choice import ChatChoice, ChatFields
from specbuild.runtime.serve.errors import (
    ApiError,
    engine_error,
    invalid_value,
    unsupported,
)
from specbuild.runtime.serve.event_stream import EventSource, EventStream
from specbuild.runtime.serve.fields import StreamOptions
from specbuild.runtime.serve.messages import template_messages, tool_list
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.output_constraint import OutputConstraint
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.serving import NEW_TURN, ChatPromptOptions, Serving
from specbuild.runtime.serve.structured import output_constraint
from specbuild.runtime.serve.token_batches import TokenBatch
from specbuild.runtime.serve.token_logprobs import TokenTexts
from specbuild.runtime.serve.usage import response_head, usage
from specbuild.runtime.text.stream import StopRule


class Chat:
    """Handles chat completions."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: ChatFields) -> Mapping[str, Any] | EventStream:
        """Return the answer, or the chunks of a stream."""
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        usage_options, splits_by_source = serving.usage_options(body), body.splits_by_source
        tools = available_tools(serving, body.tools, body.tool_choice)
        messages, variables = template_messages(body.messages), body.template_variables
        num_top_logprobs, num_prompt_logprobs = body.num_top_logprobs, body.num_prompt_logprobs
        serving.top_logprobs("top_logprobs", num_top_logprobs)
        serving.top_logprobs("prompt_logprobs", num_prompt_logprobs)
        constraint = _constraint(body, tools)
        serving.service.check_admission(body.num_choices)
        prompt = await chat_prompt(serving, messages, tools, variables, body.prompt_options)
        ids = body.truncated(
            prompt.ids, max_seq_len=serving.max_seq_len, max_tokens=body.token_limit
        )
        prompt = replace(prompt, ids=ids)
        guide = await serving.guide(constraint, prompt)
        choice_params = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.engine_token_limit,
            with_text=False,
            num_top_logprobs=num_top_logprobs,
            guide=guide,
            reasoning_budget=serving.reasoning_budget(body.thinking_token_budget, prompt),
        )
        may_shorten = body.token_limit is None
        requests = await chat_requests(serving, prompt, choice_params, may_shorten=may_shorten)
        scores = await serving.prompt_scores(requests[:1], num_prompt_logprobs)
        prompt_logprobs = None
        if scores and body.prompt_logprobs is not None:
            texts = TokenTexts(serving, as_ids=bool(body.return_tokens_as_token_ids))
            prompt_logprobs = await serving.service.in_thread(texts.prompt_logprobs, scores[0])
        head = response_head("chatcmpl", "chat.completion", model, body.request_id)
        choices = [
            self._choice(body, i, request, tools, prompt) for i, request in enumerate(requests)
        ]
        batches = serving.start(
            requests, body.urgency, splits_by_source=splits_by_source, generates=body.generates
        )
        if body.stream:
            head["object"] = "chat.completion.chunk"
            token_ids = prompt.ids if body.return_token_ids else None
            first = {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": token_ids}
            return EventStream(batches, _ChatEvents(choices, head, usage_options, first))
        async with aclosing(batches):
            async for batch in batches:
                choices[batch.choice].add(batch)
                if _all_ended(choices):
                    break
        outputs = [choice.complete() for choice in choices]
        if body.return_token_ids:
            head["prompt_token_ids"] = list(prompt.ids)
        return head | {
            "choices": outputs,
            "usage": _usage(choices),
            "prompt_logprobs": prompt_logprobs,
        }

    def _choice(
        self,
        body: ChatFields,
        index: int,
        request: Request,
        tools: Tools | None,
        prompt: ChatPrompt,
    ) -> ChatChoice:
        assert self._serving.output_format is not None
        params = request.params
        rule = StopRule(body.stop_strings, include=params.include_stop_str_in_output)
        parser = self._serving.output_format.parser(
            rule, tools or (), prompt, skip_special_tokens=params.skip_special_tokens
        )
        output = Output(
            parser,
            hidden_end_tokens=self._serving.hidden_end_tokens(params),
            single_call=body.parallel_tool_calls is False,
        )
        return ChatChoice(self._serving, body, index, request, output)


class _ChatEvents(EventSource):
    """The chunks of a streamed chat."""

    def __init__(
        self,
        choices: Sequence[ChatChoice],
        head: Mapping[str, Any],
        usage_options: StreamOptions,
        first_fields: Mapping[str, Any],
    ) -> None:
        self._choices = choices
        self._head = head
        self._usage_options = usage_options
        self._first_fields = first_fields
        self._counts_usage = usage_options.include_usage and usage_options.continuous_usage_stats

    @property
    def has_ended(self) -> bool:
        """Whether a stop string ended each output."""
        return _all_ended(self._choices)

    def begin(self) -> Iterator[Mapping[str, Any]]:
        """Yield a chunk with the role for each choice; the first has the fields of the prompt."""
        for i, choice in enumerate(self._choices):
            fields = {} if i else self._first_fields
            prompt_fields = {name: value for name, value in fields.items() if value is not None}
            yield {**self._chunk(choice, choice.begin()), **prompt_fields}

    def add(self, batch: TokenBatch) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of a batch."""
        choice = self._choices[batch.choice]
        for content in choice.chunks(batch):
            yield self._chunk(choice, content)

    def end(self) -> Iterator[Mapping[str, Any]]:
        """Yield the token counts, if they were requested."""
        if self._usage_options.include_usage:
            yield {**self._head, "choices": [], "usage": _usage(self._choices)}

    def encoded(self, batch: TokenBatch) -> bytes:
        """Return the events of a batch."""
        choice = self._choices[batch.choice]
        if self._counts_usage or not choice.is_plain:
            return super().encoded(batch)
        return choice.events(self._head, batch)

    def _chunk(self, choice: ChatChoice, content: Mapping[str, Any]) -> dict[str, Any]:
        usage = {"usage": _usage([choice])} if self._counts_usage else {}
        return {**self._head, "choices": [content], **usage}


def _constraint(body: ChatFields, tools: Tools | None) -> OutputConstraint | None:
    """Return the constraint of an output. ApiError if it constrains no complete turn."""
    constraint = output_constraint(
        body.guide(), tools, body.tool_choice, parallel=body.parallel_tool_calls
    )
    options = body.prompt_options
    if constraint is not None and not options.add_generation_prompt:
        field = (
            "continue_final_message" if options.continue_final_message else "add_generation_prompt"
        )
        raise invalid_value(
            field,
            f"{constraint.name} constrains a complete turn of the assistant: leave {field} out",
        )
    return constraint


def available_tools(
    serving: Serving,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call. ApiError if the model cannot call tools."""
    function_tools = tool_list(tools)
    if function_tools is None or choice == "none":
        return None
    if serving.output_format is None or not serving.output_format.supports_tools:
        raise unsupported(
            "tools", "this model has no format for tool calls; see --tool-call-parser"
        )
    return function_tools


async def chat_prompt(
    serving: Serving,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    options: ChatPromptOptions = NEW_TURN,
) -> ChatPrompt:
    """Return the chat as rendered by the template. ApiError if there is no template or it fails."""
    if serving.output_format is None or not serving.codec.has_template:
        raise ApiError(
            400,
            "the engine has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
        )
    try:
        return await serving.chat_prompt(messages, tools, variables, options)
    except RequestError as error:
        raise engine_error(error, "messages") from error


async def chat_requests(
    serving: Serving,
    prompt: ChatPrompt,
    choice_params: Sequence[GenerateParams],
    *,
    may_shorten: bool,
) -> list[Request]:
    """Return a request for each choice, with the stop tokens of the output format.

    Raises ApiError if the engine cannot serve them.
    """
    assert serving.output_format is not None
    stops = (*choice_params[0].stop_token_ids, *serving.output_format.stop_token_ids)
    params_with_stops = [replace(params, stop_token_ids=stops) for params in choice_params]
    prompts = [Prompt("0", prompt_ids=prompt.ids)]
    return await serving.requests(prompts, params_with_stops, may_shorten=may_shorten)


def _all_ended(choices: Sequence[ChatChoice]) -> bool:
    return None not in [choice.output.finish_reason for choice in choices]


def _usage(choices: Sequence[ChatChoice]) -> dict[str, Any]:
    return usage(
        len(choices[0].request.prompt_ids),
        sum(len(choice.output.tokens) for choice in choices),
        cached=choices[0].output.cached_tokens,
        reasoning=sum(choice.output.reasoning_tokens for choice in choices),
    )
