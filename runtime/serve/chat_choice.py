"""The body of a chat completion, and its outputs in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specbuild.runtime.request import Request, TokenEvent
from specbuild.runtime.serve.errors import invalid_value, unsupported
from specbuild.runtime.serve.event_stream import TextEvent, event_bytes
from specbuild.runtime.serve.fields import TextFields
from specbuild.runtime.serve.messages import EFFORTS, template_messages
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.parser import Delta
from specbuild.runtime.serve.request_fields import JsonList, RouteName
from specbuild.runtime.serve.serving import ChatPromptOptions, Serving
from specbuild.runtime.serve.token_batches import TokenBatch, source_fields
from specbuild.runtime.serve.token_logprobs import TokenTexts


class ChatFields(TextFields):
    """The body of a chat completion."""

    route: ClassVar[RouteName] = "chat"
    messages: JsonList[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: JsonList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
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
    def num_top_logprobs(self) -> int | None:
        """See :class:`TextFields`."""
        return self.top_logprobs or 0 if self.logprobs else None

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
            template=self.chat_template,
        )

    @property
    def echoed(self) -> str:
        """Return the text that ``echo`` puts before the answer: the assistant's last message."""
        last = self.messages[-1] if self.messages else {}
        if not self.echo or last.get("role") != "assistant":
            return ""
        return template_messages([last])[0]["content"] or ""

    def check(self) -> None:
        """Raise ApiError for unsupported values and for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs")
        if self.modalities and self.modalities != ["text"]:
            raise unsupported("modalities", "the model generates text only")


class BatchChatFields(ChatFields):
    """The body of several chats with the same fields. Each has one choice, in order."""

    route: ClassVar[RouteName] = "batch_chat"
    messages: JsonList[JsonList[dict[str, Any]]]  # type: ignore[assignment]

    def chats(self) -> list[ChatFields]:
        """Return the body of each chat. ApiError for a stream, several choices or tools."""
        for field, is_used in (
            ("stream", self.stream),
            ("n", self.num_choices != 1),
            ("tools", self.tools),
        ):
            if is_used:
                raise unsupported(field, "use /v1/chat/completions")
        if not self.messages:
            raise invalid_value("messages", "messages is empty; give at least one chat")
        fields = {name: getattr(self, name) for name in self.model_fields_set} | {"stream": False}
        chats = [ChatFields(**(fields | {"messages": messages})) for messages in self.messages]
        chats[0].refuse_unsupported()
        return chats

    @staticmethod
    def joined(answers: Sequence[Any]) -> dict[str, Any]:
        """Return the answers of the chats as one, with their token counts added."""
        usage: dict[str, Any] = {}
        for answer in answers:
            for name, count in answer["usage"].items():
                if isinstance(count, int):
                    usage[name] = usage.get(name, 0) + count
        choices = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
        return {**answers[0], "choices": choices, "usage": usage}


class ChatChoice:
    """One output of a chat, in OpenAI's format."""

    def __init__(
        self, serving: Serving, body: ChatFields, index: int, request: Request, output: Output
    ) -> None:
        self._body = body
        self._index = index
        self._texts = TokenTexts(serving, as_ids=bool(body.return_tokens_as_token_ids))
        self.request = request
        self.output = output
        self._text_event: TextEvent | None = None
        # Whether chunks have the log-probabilities or the ids of tokens, and whether they describe
        # no tokens.
        self._describes_tokens = bool(body.logprobs or body.return_token_ids)
        self.is_plain = not (self._describes_tokens or body.return_draft_tokens)

    def add(self, batch: TokenBatch) -> list[Delta]:
        """Return the deltas of a batch; none if a stop string has ended the output."""
        return [] if self.output.finish_reason is not None else self.output.add(batch)

    def begin(self) -> dict[str, Any]:
        """Return the choice of the first chunk."""
        return self.choice({"role": "assistant", "content": self._body.echoed}, None)

    def complete(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        output, body = self.output, self._body
        content = body.echoed + output.content
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
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
        elif content == "":
            message["content"] = ""
        return self.choice(message, output.finish_reason, output.tokens, "message")

    def events(self, head: Mapping[str, Any], batch: TokenBatch) -> bytes:
        """Return the events of a batch in a stream, while the choice ``is_plain``.

        The last one has the finish reason. There are none if a stop string has ended the output:
        its tokens arrive until the other choices have ended too.
        """
        if self.output.finish_reason is not None:
            return b""
        deltas = self.add(batch)
        others = [delta for delta in deltas if delta.tool is not None or delta.reasoning]
        if not others and self.output.finish_reason is None:
            if self._text_event is None:

                def chunk_of(text: str) -> dict[str, Any]:
                    return {**head, "choices": [self.choice({"content": text}, None)]}

                self._text_event = TextEvent(chunk_of)
            return b"".join([self._text_event.with_text(delta.content) for delta in deltas])
        choices = self._choices(deltas, batch.tokens)
        return b"".join([event_bytes({**head, "choices": [choice]}) for choice in choices])

    def chunks(self, batch: TokenBatch) -> list[dict[str, Any]]:
        """Return the choices of chunks for a batch.

        The last one has the finish reason. If chunks describe tokens, each token of a batch has
        chunks of its own, as if it had arrived alone.
        """
        if self.output.finish_reason is not None:
            return []
        body = self._body
        if len(batch.tokens) > 1 and self._describes_tokens and not body.return_draft_tokens:
            return [choice for single in batch.split_by_token() for choice in self.chunks(single)]
        num_before = len(self.output.tokens)
        deltas = self.add(batch)
        # A stop string may end the output within the batch.
        return self._choices(deltas, self.output.tokens[num_before:])

    def _choices(
        self, deltas: Sequence[Delta], tokens: Sequence[TokenEvent]
    ) -> list[dict[str, Any]]:
        """Return the choices of chunks for the deltas of a batch, which come of these tokens."""
        contents = [content for delta in deltas if (content := self._delta(delta))]
        chunks = [self.choice(content, None) for content in contents]
        finish_reason, body = self.output.finish_reason, self._body
        by_token = self._describes_tokens or body.return_draft_tokens
        ends_in_text = bool(contents) and "tool_calls" not in contents[-1]
        if finish_reason is not None and ends_in_text:
            chunks[-1] = self.choice(contents[-1], finish_reason)
        elif finish_reason is not None or (not chunks and by_token):
            chunks.append(self.choice({}, finish_reason))
        if body.return_draft_tokens:
            for chunk in chunks[:-1]:
                chunk.update(source_fields(tokens), token_count=0)
            chunks[-1] |= source_fields(tokens)
        if chunks and self._describes_tokens:
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
        if finish_reason is not None:
            choice["stop_reason"] = self.output.stop_text
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
            content = [self._texts.token_logprob(token) for token in tokens]
            details["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids:
            details["token_ids"] = [token.token_id for token in tokens]
        return details
