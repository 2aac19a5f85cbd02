"""``/v1/chat/completions``: answers chats with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Prompt, Request, TokenEvent
from specbuild.runtime.serve.errors import (
    ApiError,
    engine_error,
    invalid_value,
    unsupported,
)
from specbuild.runtime.serve.fields import StreamOptions, TextFields
from specbuild.runtime.serve.http import Chunks
from specbuild.runtime.serve.messages import EFFORTS, template_messages, tool_list
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Delta
from specbuild.runtime.serve.request_fields import JsonList, RouteName
from specbuild.runtime.serve.serving import NEW_TURN, ChatPromptOptions, Serving
from specbuild.runtime.serve.structured import output_constraint
from specbuild.runtime.serve.token_batches import TokenBatch, TokenBatches, source_fields
from specbuild.runtime.serve.token_logprobs import checked_top_logprobs, token_logprob
from specbuild.runtime.serve.usage import response_head, usage
from specbuild.runtime.text.stream import StopRule


class ChatFields(TextFields):
    """The body of a chat completion."""

    route: ClassVar[RouteName] = "chat"
    messages: JsonList[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: JsonList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: JsonList[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    # The chat template adds special tokens.
    add_special_tokens: bool = False

    @property
    def token_limit(self) -> int | None:
        """Return ``max_completion_tokens``, or the older ``max_tokens`` if that is absent."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the chat template's variables. ApiError if the reasoning effort is unknown."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if self.reasoning_effort not in EFFORTS:
                raise invalid_value(
                    "reasoning_effort",
                    f"reasoning_effort is {self.reasoning_effort!r}, must be one of "
                    f"{', '.join(EFFORTS)}",
                )
            variables["reasoning_effort"] = EFFORTS[self.reasoning_effort]
        return variables

    @property
    def prompt_options(self) -> ChatPromptOptions:
        """Return how the messages become a prompt. ApiError if two fields contradict each other."""
        return ChatPromptOptions.of(
            self.add_generation_prompt,
            self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            may_be_long=self.truncate_prompt_tokens is not None,
        )

    def check(self) -> None:
        """Raise ApiError for unsupported values and for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs")
        if self.modalities and self.modalities != ["text"]:
            raise unsupported("modalities", "the model generates text only")


class Chat:
    """Handles chat completions."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: ChatFields) -> Mapping[str, Any] | Chunks:
        """Return the answer, or the chunks of a stream."""
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        usage_options, splits_by_source = body.usage_options, body.splits_by_source
        tools = available_tools(serving, body.tools, body.tool_choice)
        messages, variables = template_messages(body.messages), body.template_variables
        num_top_logprobs = None
        if body.logprobs:
            num_top_logprobs = checked_top_logprobs("top_logprobs", body.top_logprobs)
        constraint = output_constraint(
            body.guide(), tools, body.tool_choice, parallel=body.parallel_tool_calls
        )
        serving.service.check_admission(body.num_choices)
        prompt_options = body.prompt_options
        if constraint is not None and not prompt_options.add_generation_prompt:
            field = (
                "continue_final_message"
                if prompt_options.continue_final_message
                else "add_generation_prompt"
            )
            raise invalid_value(
                field,
                f"{constraint.name} constrains a complete turn of the assistant: leave {field} out",
            )
        prompt = await chat_prompt(serving, messages, tools, variables, prompt_options)
        ids = body.truncated(
            prompt.ids, max_seq_len=serving.max_seq_len, max_tokens=body.token_limit
        )
        prompt = replace(prompt, ids=ids)
        guide = await serving.guide(constraint, prompt)
        choice_params = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.token_limit,
            with_text=False,
            num_top_logprobs=num_top_logprobs,
            guide=guide,
        )
        may_shorten = body.token_limit is None
        requests = await chat_requests(serving, prompt, choice_params, may_shorten=may_shorten)
        head = response_head("chatcmpl", "chat.completion", model, body.request_id)
        choices = [
            self._choice(body, i, request, tools, prompt) for i, request in enumerate(requests)
        ]
        batches = serving.start(requests, body.urgency, splits_by_source=splits_by_source)
        if body.stream:
            head["object"] = "chat.completion.chunk"
            return self._stream(batches, choices, head, usage_options)
        async with aclosing(batches):
            async for batch in batches:
                choices[batch.choice].add(batch)
                if _all_ended(choices):
                    break
        outputs = [choice.complete() for choice in choices]
        if body.return_token_ids:
            head["prompt_token_ids"] = list(prompt.ids)
        return head | {"choices": outputs, "usage": _usage(choices)}

    def _choice(
        self,
        body: ChatFields,
        index: int,
        request: Request,
        tools: Tools | None,
        prompt: ChatPrompt,
    ) -> _Choice:
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
        return _Choice(self._serving, body, index, request, output)

    async def _stream(
        self,
        batches: TokenBatches,
        choices: Sequence[_Choice],
        head: Mapping[str, Any],
        usage_options: StreamOptions,
    ) -> Chunks:
        def chunk(choice: _Choice, content: Mapping[str, Any]) -> dict[str, Any]:
            usage = {"usage": _usage([choice])} if usage_options.continuous_usage_stats else {}
            return {**head, "choices": [content], **usage}

        async with aclosing(batches):
            for choice in choices:
                yield chunk(choice, choice.begin())
            async for batch in batches:
                choice = choices[batch.choice]
                for content in choice.chunks(batch):
                    yield chunk(choice, content)
                if _all_ended(choices):
                    break
        if usage_options.include_usage:
            yield {**head, "choices": [], "usage": _usage(choices)}


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
        raise unsupported("tools", "this model has no format for tool calls")
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
    return await serving.requests(prompts, params_with_stops, raw=True, may_shorten=may_shorten)


class _Choice:
    """One output of a chat, in OpenAI's format."""

    def __init__(
        self, serving: Serving, body: ChatFields, index: int, request: Request, output: Output
    ) -> None:
        self._serving = serving
        self._body = body
        self._index = index
        self.request = request
        self.output = output

    def add(self, batch: TokenBatch) -> list[Delta]:
        """Return the deltas of a batch; none if a stop string has ended the output."""
        return [] if self.output.finish_reason is not None else self.output.add(batch)

    def begin(self) -> dict[str, Any]:
        """Return the choice of the first chunk, with the prompt's token ids if requested."""
        choice = self.choice({"role": "assistant", "content": ""}, None)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self.request.prompt_ids)
        return choice

    def complete(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        output, body = self.output, self._body
        message: dict[str, Any] = {"role": "assistant", "content": output.content or None}
        if output.reasoning and body.include_reasoning:
            message |= {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
        if output.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in output.calls
            ]
        elif output.content == "":
            message["content"] = ""
        return self.choice(message, output.finish_reason, output.tokens, "message")

    def chunks(self, batch: TokenBatch) -> list[dict[str, Any]]:
        """Return the choices of chunks for a batch.

        The last one has the log-probabilities and the finish reason.
        """
        if self.output.finish_reason is not None:
            return []
        num_before = len(self.output.tokens)
        deltas = map(self._delta, self.add(batch))
        chunks = [self.choice(delta, None) for delta in deltas if delta]
        # A stop string may end the output within the batch.
        tokens = self.output.tokens[num_before:]
        finish_reason, body = self.output.finish_reason, self._body
        by_token = body.logprobs or body.return_draft_tokens or body.return_token_ids
        if finish_reason is not None or (not chunks and by_token):
            chunks.append(self.choice({}, finish_reason))
        if body.return_draft_tokens:
            for chunk in chunks[:-1]:
                chunk.update(source_fields(tokens), token_count=0)
            chunks[-1] |= source_fields(tokens)
        if chunks and (body.logprobs or body.return_token_ids):
            chunks[-1] |= self._details(tokens)
        return chunks

    def choice(
        self,
        content: Mapping[str, Any],
        finish_reason: str | None,
        tokens: Sequence[TokenEvent] | None = None,
        key: str = "delta",
    ) -> dict[str, Any]:
        """Return a choice object of an answer or of a chunk."""
        choice = {
            "index": self._index,
            key: content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return choice if tokens is None else choice | self._details(tokens)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.tool is not None:
            call = self.output.calls[delta.tool]
            function = {"arguments": delta.arguments}
            if delta.name is None:
                return {"tool_calls": [{"index": delta.tool, "function": function}]}
            named_function = {"name": delta.name, **function}
            call_fields = {
                "index": delta.tool,
                "id": call.id,
                "type": "function",
                "function": named_function,
            }
            return {"tool_calls": [call_fields]}
        if delta.reasoning:
            if not self._body.include_reasoning:
                return {}
            return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        return {"content": delta.content}

    def _details(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._body.logprobs:
            content = [token_logprob(self._serving, token) for token in tokens]
            details["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids:
            details["token_ids"] = [token.token_id for token in tokens]
        return details


def _all_ended(choices: Sequence[_Choice]) -> bool:
    return all(choice.output.finish_reason is not None for choice in choices)


def _usage(choices: Sequence[_Choice]) -> dict[str, Any]:
    return usage(
        len(choices[0].request.prompt_ids),
        sum(len(choice.output.tokens) for choice in choices),
        cached=choices[0].output.cached_tokens,
        reasoning=sum(choice.output.reasoning_tokens for choice in choices),
    )
