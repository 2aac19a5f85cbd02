"""The bodies of Anthropic's messages API, as chats in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from specbuild.runtime.serve.chat_choice import ChatFields
from specbuild.runtime.serve.errors import ApiError, invalid_value, unsupported
from specbuild.runtime.serve.request_fields import JsonList, RequestFields, RouteName

# Anthropic's error types by status. Others are api_error, or invalid_request_error below 500.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Message(BaseModel):
    """A message: text, or a list of content blocks."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: str | JsonList[dict[str, Any]]


class PromptFields(RequestFields):
    """The fields of a conversation."""

    route: ClassVar[RouteName] = "count_tokens"
    model: str
    messages: JsonList[Message]
    system: str | JsonList[dict[str, Any]] | None = None
    tools: JsonList[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def error_body(cls, error: ApiError) -> dict[str, Any]:
        """Return an error in Anthropic's form."""
        default = "invalid_request_error" if error.status < 500 else "api_error"
        error_type = _ERROR_TYPES.get(error.status, default)
        return {"type": "error", "error": {"type": error_type, "message": error.message}}

    def chat(self, **fields: Any) -> ChatFields:
        """Return the conversation as the body of a chat. ApiError if a part is unsupported."""
        choice = self.tool_choice or {}
        chat_fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*self._system_messages(), *self._messages()],
            "tools": [_function(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())]
            or None,
            "tool_choice": _chat_choice(choice) if choice else None,
            "chat_template_kwargs": self._template_variables(),
        }
        if choice.get("disable_parallel_tool_use"):
            chat_fields["parallel_tool_calls"] = False
        return ChatFields(**chat_fields, **fields)

    def _template_variables(self) -> dict[str, Any]:
        thinking = (self.thinking or {}).get("type")
        variables: dict[str, Any] = {}
        if thinking in ("enabled", "adaptive", "disabled"):
            # Qwen3's and GLM's templates have the first variable, DeepSeek's the second.
            variables = dict.fromkeys(("enable_thinking", "thinking"), thinking != "disabled")
        elif thinking is not None:
            raise invalid_value(
                "thinking.type", f"thinking.type is {thinking!r}, must be enabled or disabled"
            )
        return variables | (self.chat_template_kwargs or {})

    def _system_messages(self) -> list[dict[str, Any]]:
        if not self.system:
            return []
        text = self.system if isinstance(self.system, str) else _text(self.system, "system")
        return [{"role": "system", "content": text}]

    def _messages(self) -> Iterator[dict[str, Any]]:
        for i, message in enumerate(self.messages):
            path = f"messages.{i}.content"
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield _assistant_message(message.content, path)
            else:
                yield from _user_messages(message.role, message.content, path)


class MessageFields(PromptFields):
    """The body of a message request."""

    route: ClassVar[RouteName] = "messages"
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: JsonList[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: dict[str, Any] | None = None

    @property
    def output_fields(self) -> dict[str, Any]:
        """Return the fields of a chat that control its output. ApiError if one is unsupported."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        config = self.output_config or {}
        if config.get("effort") is not None:
            fields["reasoning_effort"] = config["effort"]
        output_format = config.get("format")
        if output_format is not None:
            if not isinstance(output_format, dict) or "schema" not in output_format:
                raise invalid_value("output_config.format", "output_config.format has no schema")
            schema = {"name": "output", "schema": output_format["schema"]}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def budget_tokens(self) -> int | None:
        """Return the limit of thinking tokens; None without one. ApiError if it is invalid."""
        tokens = (self.thinking or {}).get("budget_tokens")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise invalid_value(
                "thinking.budget_tokens",
                f"thinking.budget_tokens is {tokens!r}, must be a number from 1",
            )
        return tokens


def _chat_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return a tool choice in OpenAI's form."""
    choice_type = choice.get("type")
    if choice_type == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice_type not in _TOOL_CHOICES:
        raise invalid_value(
            "tool_choice.type",
            f"tool_choice.type is {choice_type!r}, must be auto, any, tool or none",
        )
    return _TOOL_CHOICES[choice_type]


def _function(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form. ApiError for tools that Anthropic's servers run."""
    if tool.get("type", "custom") != "custom":
        raise unsupported(path, "this server runs no tools; send a tool with an input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    named = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": named}


def _text(blocks: Sequence[Mapping[str, Any]], path: str) -> str:
    """Return the text of blocks. ApiError for the first one that is not text."""
    texts = []
    for i, block in enumerate(blocks):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise unsupported(
                f"{path}.{i}", f"only text is accepted here, not {block.get('type')!r}"
            )
        texts.append(block["text"])
    return "\n".join(texts)


def _assistant_message(blocks: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    """Return an assistant's message: its text, thinking and calls."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text([block], f"{path}.{i}"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) or None}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(
    role: str, blocks: Sequence[Mapping[str, Any]], path: str
) -> Iterator[dict[str, Any]]:
    """Yield the tool results of a message, then its text."""
    texts = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = _text(content, f"{path}.{i}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            texts.append(block)
    if texts:
        yield {"role": role, "content": _text(texts, path)}
