"""``/v1/chat/completions``: messages in, content, reasoning and calls of tools out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Prompt, Request, TokenEvent
from specbuild.runtime.serve.errors import (
    ApiError,
    engine_refuses,
    not_offered,
    refused,
)
from specbuild.runtime.serve.fields import StreamOptions, TextFields
from specbuild.runtime.serve.http import Chunks
from specbuild.runtime.serve.messages import EFFORTS, template_messages, tool_list
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.parser import ChatPrompt, Delta
from specbuild.runtime.serve.request_fields import Listed, Route
from specbuild.runtime.serve.serving import NEW_TURN, PromptForm, Serving
from specbuild.runtime.serve.structured import asked_form
from specbuild.runtime.serve.token_logprobs import token_logprob, top_logprobs
from specbuild.runtime.serve.turns import Turn, Turns, source
from specbuild.runtime.serve.usage import answer_head, usage
from specbuild.runtime.text.stream import StopRule


class ChatFields(TextFields):
    """The body of a chat."""

    route: ClassVar[Route] = "chat"
    messages: Listed[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Listed[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    # The chat template writes them.
    add_special_tokens: bool = False

    @property
    def most_tokens(self) -> int | None:
        """``max_completion_tokens``, else the older ``max_tokens``."""
        both = (self.max_completion_tokens, self.max_tokens)
        return next((most for most in both if most is not None), None)

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is told beside the messages. ApiError where an effort is unknown."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if self.reasoning_effort not in EFFORTS:
                raise refused(
                    "reasoning_effort",
                    f"reasoning_effort is {self.reasoning_effort!r}, must be one of "
                    f"{', '.join(EFFORTS)}",
                )
            given["reasoning_effort"] = EFFORTS[self.reasoning_effort]
        return given

    @property
    def prompt_form(self) -> PromptForm:
        """Return how the messages become a prompt. ApiError where two fields contradict."""
        return PromptForm.of(
            self.add_generation_prompt,
            self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            may_be_long=self.truncate_prompt_tokens is not None,
        )

    def check(self) -> None:
        """ApiError for what is not offered, and for what contradicts itself."""
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs")
        if self.modalities and self.modalities != ["text"]:
            raise not_offered("modalities", "the model gives text")


class Chat:
    """The route, over a server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def answer(self, body: ChatFields) -> Mapping[str, Any] | Chunks:
        """An answer, or the chunks of one."""
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        with_usage, by_source = body.streamed_usage, body.by_source
        tools = offered_tools(serving, body.tools, body.tool_choice)
        messages, variables = template_messages(body.messages), body.variables
        likeliest = None
        if body.logprobs:
            likeliest = top_logprobs("top_logprobs", body.top_logprobs)
        asked = asked_form(body.guide(), tools, body.tool_choice, parallel=body.parallel_tool_calls)
        serving.service.check_admission(body.choices)
        form = body.prompt_form
        if asked is not None and not form.add_generation_prompt:
            field = (
                "continue_final_message" if form.continue_final_message else "add_generation_prompt"
            )
            raise refused(field, f"{asked.name} is the form of a full turn: leave {field} out")
        prompt = await chat_prompt(serving, messages, tools, variables, form)
        kept = body.truncated(
            prompt.ids, max_seq_len=serving.max_seq_len, max_tokens=body.most_tokens
        )
        prompt = replace(prompt, ids=kept)
        guide = await serving.guide(asked, prompt)
        each = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.most_tokens,
            text=False,
            likeliest=likeliest,
            guide=guide,
        )
        may_clip = body.most_tokens is None
        requests = await chat_requests(serving, prompt, each, may_clip=may_clip)
        head = answer_head("chatcmpl", "chat.completion", model, body.request_id)
        choices = [
            self._choice(body, i, request, tools, prompt) for i, request in enumerate(requests)
        ]
        turns = serving.turns(requests, body.urgency, by_source=by_source)
        if body.stream:
            head["object"] = "chat.completion.chunk"
            return self._stream(turns, choices, head, with_usage)
        async with aclosing(turns):
            async for turn in turns:
                choices[turn.choice].take(turn)
                if _all_ended(choices):
                    break
        shown = [choice.whole() for choice in choices]
        if body.return_token_ids:
            head["prompt_token_ids"] = list(prompt.ids)
        return head | {"choices": shown, "usage": _usage(choices)}

    def _choice(
        self,
        body: ChatFields,
        index: int,
        request: Request,
        tools: Tools | None,
        prompt: ChatPrompt,
    ) -> _Choice:
        assert self._serving.form is not None
        params = request.params
        rule = StopRule(body.stop_strings, include=params.include_stop_str_in_output)
        parser = self._serving.form.parser(
            rule, tools or (), prompt, skip_special_tokens=params.skip_special_tokens
        )
        output = Output(
            parser,
            hidden_ends=self._serving.hidden_ends(params),
            single_call=body.parallel_tool_calls is False,
        )
        return _Choice(self._serving, body, index, request, output)

    async def _stream(
        self,
        turns: Turns,
        choices: Sequence[_Choice],
        head: Mapping[str, Any],
        with_usage: StreamOptions,
    ) -> Chunks:
        def chunk(choice: _Choice, shown: Mapping[str, Any]) -> dict[str, Any]:
            usage = {"usage": _usage([choice])} if with_usage.continuous_usage_stats else {}
            return {**head, "choices": [shown], **usage}

        async with aclosing(turns):
            for choice in choices:
                yield chunk(choice, choice.begin())
            async for turn in turns:
                choice = choices[turn.choice]
                for shown in choice.pieces(turn):
                    yield chunk(choice, shown)
                if _all_ended(choices):
                    break
        if with_usage.include_usage:
            yield {**head, "choices": [], "usage": _usage(choices)}


def offered_tools(
    serving: Serving,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
) -> list[dict[str, Any]] | None:
    """The tools that the model may call. ApiError where it cannot call any."""
    listed = tool_list(tools)
    if listed is None or choice == "none":
        return None
    if serving.form is None or not serving.form.calls_tools:
        raise not_offered("tools", "this model's outputs have no form for calls of tools")
    return listed


async def chat_prompt(
    serving: Serving,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    form: PromptForm = NEW_TURN,
) -> ChatPrompt:
    """A chat as the template renders it. ApiError where there is no template, or it refuses."""
    if serving.form is None or not serving.codec.has_template:
        raise ApiError(
            400,
            "the engine has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
        )
    try:
        return await serving.chat_prompt(messages, tools, variables, form)
    except RequestError as error:
        raise engine_refuses(error, "messages") from error


async def chat_requests(
    serving: Serving, prompt: ChatPrompt, each: Sequence[GenerateParams], *, may_clip: bool
) -> list[Request]:
    """A chat as requests, one for each choice, that end where its form ends a turn. ApiError."""
    assert serving.form is not None
    stops = (*each[0].stop_token_ids, *serving.form.stop_token_ids)
    ending = [replace(params, stop_token_ids=stops) for params in each]
    prompts = [Prompt("0", prompt_ids=prompt.ids)]
    return await serving.requests(prompts, ending, raw=True, may_clip=may_clip)


class _Choice:
    """One output of a chat, in OpenAI's form."""

    def __init__(
        self, serving: Serving, body: ChatFields, index: int, request: Request, output: Output
    ) -> None:
        self._serving = serving
        self._body = body
        self._index = index
        self.request = request
        self.output = output

    def take(self, turn: Turn) -> list[Delta]:
        """What a turn adds: nothing where a stop string has ended the output."""
        return [] if self.output.finish_reason is not None else self.output.take(turn)

    def begin(self) -> dict[str, Any]:
        """The first chunk's choice, with the ids of the prompt where they are requested."""
        begun = self.shown({"role": "assistant", "content": ""}, None)
        if self._body.return_token_ids:
            begun["prompt_token_ids"] = list(self.request.prompt_ids)
        return begun

    def whole(self) -> dict[str, Any]:
        """All of it, at once."""
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
        return self.shown(message, output.finish_reason, output.tokens, "message")

    def pieces(self, turn: Turn) -> list[dict[str, Any]]:
        """Chunks of what a turn gave; the last one has its tokens' log-probabilities and end."""
        if self.output.finish_reason is not None:
            return []
        before = len(self.output.tokens)
        deltas = map(self._delta, self.take(turn))
        shown = [self.shown(delta, None) for delta in deltas if delta]
        # A stop string may end the output before the turn ends.
        tokens = self.output.tokens[before:]
        end, body = self.output.finish_reason, self._body
        by_token = body.logprobs or body.return_draft_tokens or body.return_token_ids
        if end is not None or (not shown and by_token):
            shown.append(self.shown({}, end))
        if body.return_draft_tokens:
            for chunk in shown[:-1]:
                chunk.update(source(tokens), token_count=0)
            shown[-1] |= source(tokens)
        if shown and (body.logprobs or body.return_token_ids):
            shown[-1] |= self._details(tokens)
        return shown

    def shown(
        self,
        content: Mapping[str, Any],
        end: str | None,
        tokens: Sequence[TokenEvent] | None = None,
        place: str = "delta",
    ) -> dict[str, Any]:
        """A choice of an answer or of a chunk."""
        shown = {"index": self._index, place: content, "logprobs": None, "finish_reason": end}
        return shown if tokens is None else shown | self._details(tokens)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.tool is not None:
            call = self.output.calls[delta.tool]
            function = {"arguments": delta.arguments}
            if delta.name is None:
                return {"tool_calls": [{"index": delta.tool, "function": function}]}
            named = {"name": delta.name, **function}
            begun = {"index": delta.tool, "id": call.id, "type": "function", "function": named}
            return {"tool_calls": [begun]}
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
