"""The body of a response request, and its input as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.errors import invalid_value, unsupported
from specbuild.runtime.serve.fields import GenerationFields
from specbuild.runtime.serve.messages import EFFORTS
from specbuild.runtime.serve.request_fields import JsonList, RouteName
from specbuild.runtime.serve.structured import response_guide

LOGPROBS = "message.output_text.logprobs"
# Of these values only LOGPROBS has an effect. Reasoning items contain plain text instead of
# encrypted content, and the other values concern tools and inputs that are refused.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
_FORMAT_KEYS = ("type", "name", "description", "schema", "strict", "json_schema")


class Reasoning(BaseModel):
    """The requested reasoning effort."""

    model_config = ConfigDict(strict=True, extra="allow")
    effort: str | None = None


class ResponseFields(GenerationFields):
    """The body of a response request."""

    route: ClassVar[RouteName] = "responses"
    input: str | JsonList[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: JsonList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: dict[str, Any] | None = None
    include: JsonList[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None

    @property
    def logprobs(self) -> bool:
        """Whether text is returned with the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def effort(self) -> str | None:
        """Return the reasoning effort for chat templates. ApiError if it is unknown."""
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort is not None and effort not in EFFORTS:
            names = ", ".join(EFFORTS)
            raise invalid_value("reasoning.effort", f"effort is {effort!r}, must be one of {names}")
        return None if effort is None else EFFORTS[effort]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the template's variables, including the effort. ApiError if that is unknown."""
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        return {**(self.chat_template_kwargs or {}), **effort}

    def check(self) -> None:
        """Raise ApiError for unsupported values and for fields that contradict each other."""
        for value in self.include or ():
            if value not in INCLUDABLE:
                raise invalid_value(
                    "include", f"include has {value!r}, must be of {', '.join(INCLUDABLE)}"
                )
        if self.num_choices != 1:
            raise invalid_value("n", "a response has one output")
        if self.truncation not in (None, "disabled"):
            raise unsupported("truncation", "shorten the input")
        if self.background and self.stream:
            raise invalid_value(
                "background", "a response cannot be both streamed and created in the background"
            )
        if self.background and self.store is False:
            raise invalid_value("store", "a background response must be stored")

    @property
    def text_format(self) -> dict[str, Any]:
        """Return the fields of ``text.format`` that OpenAI's API defines."""
        text_format = (self.text or {}).get("format") or {"type": "text"}
        return {key: text_format[key] for key in _FORMAT_KEYS if key in text_format}

    def guide(self) -> Guide | None:
        """Return the guide of ``text.format`` or of another field. ApiError if two constrain the
        output.
        """
        text_format, other_guide = (self.text or {}).get("format"), super().guide()
        if text_format is not None and not isinstance(text_format, dict):
            raise invalid_value("text.format", "text.format is not an object")
        text_guide = response_guide(text_format, "text.format")
        if text_guide is not None and other_guide is not None:
            raise invalid_value(
                "text.format", f"{other_guide.name} also constrains the output; leave one out"
            )
        return other_guide if text_guide is None else text_guide

    def input_items(self, response_id: str) -> list[dict[str, Any]]:
        """Return the items of the input, each with an id that belongs to the response."""
        items: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        if not isinstance(self.input, str):
            items = self.input
        prefix = response_id.replace("resp_", "item_")
        return [_input_item(item, f"{prefix}_{i}") for i, item in enumerate(items)]

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as messages, without instructions. ApiError if an item is invalid."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)


def _input_item(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item with a type and an id. The content of a message is a list of parts."""
    typed = {"id": item_id, "type": "message", **item}
    if typed["type"] == "message" and isinstance(typed.get("content"), str):
        part_type = "output_text" if typed.get("role") == "assistant" else "input_text"
        typed["content"] = [{"type": part_type, "text": typed["content"]}]
    return typed


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages. Reasoning and calls become part of the assistant's message."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        item_type, path = item.get("type", "message"), f"input.{i}"
        if item_type == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif item_type == "reasoning":
            _assistant(messages)["reasoning"] = _reasoning_text(item)
        elif item_type == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif item_type == "function_call_output":
            output = item.get("output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        else:
            raise unsupported(path, f"items of type {item_type!r} are unknown")
    return _joined(messages)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it is an assistant message without content; else append one."""
    if not messages or messages[-1].get("role") != "assistant" or "content" in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge reasoning into the assistant message that follows it."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        previous = joined[-1] if joined else {}
        if message["role"] == "assistant" == previous.get("role") and set(previous) == {
            "role",
            "reasoning",
        }:
            joined[-1] = {**previous, **message}
        else:
            joined.append(message)
    return joined


def _reasoning_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))
