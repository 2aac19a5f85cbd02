"""Request fields of OpenAI's and vLLM's APIs that this server does not implement.

All other fields of these APIs belong to the pydantic model of a route. A field that would change
the output is refused with its name. A field that cannot change it is ignored, and the table has the
reason. ``docs/write_request_fields.py`` writes the table of all fields to docs/request-fields.md.

Fields that neither API defines are ignored, and each name is logged once. Fields of other servers
that change the output are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from specbuild.runtime.serve.errors import ApiError, unsupported

Item = TypeVar("Item")
# Validation stops at the first invalid item, since each error takes a kilobyte.
JsonList = Annotated[list[Item], Field(fail_fast=True)]
RouteName = Literal[
    "completions", "chat", "responses", "tokenize", "detokenize", "messages", "count_tokens",
    "batch_chat",
]  # fmt: skip
GENERATION: tuple[RouteName, ...] = ("completions", "chat", "responses")
TEXT: tuple[RouteName, ...] = ("completions", "chat")
CHATS: tuple[RouteName, ...] = ("chat", "tokenize")
_COMPLETIONS: tuple[RouteName, ...] = ("completions",)
_CHAT: tuple[RouteName, ...] = ("chat",)
_RESPONSES: tuple[RouteName, ...] = ("responses",)
_MESSAGES: tuple[RouteName, ...] = ("messages", "count_tokens")
# Unknown field names that were logged; the number is limited.
_LOGGED: set[str] = set()
_MAX_LOGGED = 100
log = logging.getLogger("specbuild.serve")


@dataclass(frozen=True)
class IgnoredField:
    """A field without effect on the output. In ``name`` a dot separates an object and its key."""

    name: str
    routes: tuple[RouteName, ...]
    reason: str


@dataclass(frozen=True)
class RefusedField:
    """A field that would change the output. Null and the values in ``neutral`` are accepted."""

    name: str
    routes: tuple[RouteName, ...]
    instead: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Return whether a value is null or neutral. Types must match: 0 is not False."""
        return value is None or any(type(value) is type(n) and value == n for n in self.neutral)


_IDENTITY = "identifies the end user to OpenAI"
_CACHE = "the prefix cache needs no hint; cache_salt separates tenants"
_MEDIA = "images, audio and video are refused"
_RENDER = "an option of vLLM's render routes only"
IGNORED = (
    IgnoredField("user", GENERATION, _IDENTITY),
    IgnoredField("safety_identifier", GENERATION, _IDENTITY),
    IgnoredField("service_tier", GENERATION, "price and latency class of OpenAI; see priority"),
    IgnoredField("access_programs", _RESPONSES, "access to OpenAI's models"),
    IgnoredField("prompt_cache_key", GENERATION, _CACHE),
    IgnoredField("prompt_cache_options", GENERATION, _CACHE),
    IgnoredField("prompt_cache_retention", GENERATION, _CACHE),
    IgnoredField("metadata", TEXT, "labels of stored completions, which this server does not keep"),
    IgnoredField("store", TEXT, "this server does not keep chats and completions"),
    IgnoredField("prediction", _CHAT, "a speed hint; drafts do this without one"),
    IgnoredField("max_tool_calls", _RESPONSES, "limits OpenAI's built-in tools, which are refused"),
    IgnoredField(
        "background_options", _RESPONSES, "completion window of OpenAI's background queue"
    ),
    IgnoredField("image", _RESPONSES, _MEDIA),
    IgnoredField("media_io_kwargs", CHATS, _MEDIA),
    IgnoredField("mm_processor_kwargs", ("chat", "responses", "tokenize"), _MEDIA),
    IgnoredField("session_id", TEXT, "a hint for vLLM's routers"),
    IgnoredField("stream_interval", TEXT, "only moves the boundaries of chunks"),
    IgnoredField("return_token_offsets", TEXT, _RENDER),
    IgnoredField("return_mm_kwargs", TEXT, _RENDER),
    IgnoredField(
        "spaces_between_special_tokens", TEXT, "concerns tokenizers without tokenizer.json"
    ),
    IgnoredField("guided_decoding_backend", GENERATION, "there is one backend, llguidance"),
    IgnoredField("structured_outputs.disable_fallback", GENERATION, "there is no fallback backend"),
    IgnoredField("metadata", ("messages",), "labels of Anthropic's logs"),
    IgnoredField("service_tier", ("messages",), "price and latency class of Anthropic"),
    IgnoredField("cache_control", _MESSAGES, "the prefix cache needs no marks"),
    IgnoredField("stream_options.include_usage", _RESPONSES, "response.completed always has usage"),
)

_EXTENSION = "there are no extensions of vLLM here"
_TRANSFER = "prefill and decode run in one server"
_TOOLS = "use tools and tool_choice"
_FORM = "express it in the schema, the pattern or the grammar"
_ROUTED = "the selected experts are not returned"
_SERVER_SEARCH = "this server runs no tools; pass functions in tools"
REFUSED = (
    # Sampling.
    RefusedField("use_beam_search", GENERATION, "sample several choices with n", (False,)),
    RefusedField("length_penalty", GENERATION, "there is no beam search", (1.0, 1)),
    RefusedField("watermarking", GENERATION, "outputs are not watermarked", (False,)),
    RefusedField("logits_processors", GENERATION, _EXTENSION, ([],)),
    RefusedField("vllm_xargs", GENERATION, _EXTENSION, ({},)),
    RefusedField(
        "repetition_detection", GENERATION, "set a penalty, or end the stream in the client"
    ),
    RefusedField("best_of", _CHAT, "request n choices and choose in the client", (1,)),
    # Answers.
    RefusedField("prompt_logprobs", _RESPONSES, "use chat completions", (False,)),
    RefusedField("logprob_token_ids", GENERATION, "request top_logprobs", ([],)),
    RefusedField("return_token_ids", _RESPONSES, "use chat completions", (False,)),
    RefusedField("return_draft_tokens", _RESPONSES, "stream a chat or a completion", (False,)),
    RefusedField("return_prompt_text", _CHAT, "use /tokenize and /detokenize", (False,)),
    RefusedField("routed_experts_prompt_start", GENERATION, _ROUTED, (0,)),
    RefusedField("request_id", _RESPONSES, "the server chooses the ids of stored responses"),
    RefusedField("enable_response_messages", _RESPONSES, "use the items of output", (False,)),
    RefusedField(
        "stream_options.include_obfuscation", GENERATION, "chunks are not padded", (False,)
    ),
    RefusedField(
        "stream_options.continuous_usage_stats",
        _RESPONSES,
        "response.completed has usage",
        (False,),
    ),
    RefusedField("kv_transfer_params", GENERATION, _TRANSFER, ({},)),
    RefusedField("ec_transfer_params", GENERATION, _TRANSFER, ({},)),
    # Prompts.
    RefusedField("suffix", _COMPLETIONS, "the model only continues a prompt", ("",)),
    RefusedField("prompt_embeds", _COMPLETIONS, "send the prompt as text or token ids", ([], "")),
    RefusedField("documents", _CHAT, "put documents into messages, or chat_template_kwargs", ([],)),
    RefusedField("prompt", _RESPONSES, "stored prompt templates are OpenAI's; send input"),
    RefusedField("conversation", _RESPONSES, "pass previous_response_id"),
    RefusedField("context_management", _RESPONSES, "shorten the input", ([],)),
    RefusedField("previous_input_messages", _RESPONSES, "send the items as input", ([],)),
    RefusedField("previous_response", _RESPONSES, "pass previous_response_id, or items as input"),
    RefusedField("continue_final_message", _RESPONSES, "use chat completions", (False,)),
    RefusedField("add_generation_prompt", _RESPONSES, "use chat completions", (True,)),
    RefusedField("truncate_prompt_tokens", _RESPONSES, "shorten the input"),
    # Features of OpenAI's models and servers other than text.
    RefusedField("audio", _CHAT, "the model produces text"),
    RefusedField("moderation", ("chat", "responses"), "outputs are not moderated"),
    RefusedField("web_search_options", _CHAT, _SERVER_SEARCH),
    RefusedField("functions", _CHAT, _TOOLS, ([],)),
    RefusedField("function_call", _CHAT, _TOOLS, ("none",)),
    RefusedField("verbosity", _CHAT, "ask for a length in the messages", ("medium",)),
    RefusedField("text.verbosity", _RESPONSES, "ask for a length in the input", ("medium",)),
    # OpenAI's models without summaries accept "auto", and return none.
    RefusedField("reasoning.summary", _RESPONSES, "reasoning is returned unchanged", ("auto",)),
    RefusedField(
        "reasoning.generate_summary", _RESPONSES, "reasoning is returned unchanged", ("auto",)
    ),
    RefusedField("reasoning.context", _RESPONSES, "send the reasoning items to keep", ("auto",)),
    RefusedField("reasoning.mode", _RESPONSES, "set reasoning.effort", ("standard",)),
    # Anthropic's servers.
    RefusedField("container", _MESSAGES, "this server runs no code"),
    RefusedField("mcp_servers", _MESSAGES, _SERVER_SEARCH, ([],)),
    RefusedField("context_management", _MESSAGES, "shorten the messages"),
    # Structured output.
    RefusedField("guided_whitespace_pattern", GENERATION, _FORM),
    RefusedField("structured_outputs.whitespace_pattern", GENERATION, _FORM),
    RefusedField("structured_outputs.disable_any_whitespace", GENERATION, _FORM, (False,)),
    RefusedField("structured_outputs.disable_additional_properties", GENERATION, _FORM, (False,)),
    RefusedField("structured_outputs.structural_tag", GENERATION, "use a grammar"),
)

# Fields of SGLang, llama.cpp, Text Generation Inference and OpenRouter that change the output.
# The documented table omits them, since neither OpenAI nor vLLM defines them.
_OTHER_NAME = "use max_tokens and min_tokens"
_OTHER_FORM = "use structured_outputs"
_OTHER_SAMPLER = "use top_p, min_p or a penalty"
_THINKING = "use reasoning_effort or chat_template_kwargs"
OTHER_SERVERS = (
    *(
        RefusedField(name, GENERATION, _OTHER_NAME, (-1,))
        for name in ("n_predict", "max_new_tokens")
    ),
    RefusedField("min_new_tokens", GENERATION, _OTHER_NAME, (0,)),
    *(RefusedField(name, GENERATION, _OTHER_FORM) for name in ("regex", "ebnf", "json_schema")),
    RefusedField("grammar", GENERATION, _OTHER_FORM, ("",)),
    *(RefusedField(name, GENERATION, _OTHER_SAMPLER, (1, 1.0)) for name in ("typical_p", "tfs_z")),
    *(
        RefusedField(name, GENERATION, _OTHER_SAMPLER, (0, 0.0))
        for name in ("top_a", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range")
    ),
    RefusedField("top_n_sigma", GENERATION, _OTHER_SAMPLER, (-1, -1.0, 0, 0.0)),
    *(RefusedField(name, GENERATION, _THINKING) for name in ("enable_thinking", "thinking")),
    RefusedField("reasoning", TEXT, _THINKING),
    RefusedField("lora_path", GENERATION, "an engine has one model"),
    RefusedField("custom_logit_processor", GENERATION, _EXTENSION),
)


class RequestFields(BaseModel):
    """The body of a request to ``route``. The tables refuse or ignore all other fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    route: ClassVar[RouteName]

    @classmethod
    def error_body(cls, error: ApiError) -> dict[str, Any]:
        """Return an error in the form of the route's API."""
        return error.body

    def refuse_unsupported(self) -> None:
        """Raise ApiError for the first refused field, and log unknown names."""
        given_fields = self.model_fields_set
        for part, field in _refused_fields(self.route):
            if part in given_fields and not field.allows(_value(self, field.name)):
                raise unsupported(field.name, field.instead)
        for name in set(self.model_extra or ()).difference(_known_names(self.route)):
            if name not in _LOGGED and len(_LOGGED) < _MAX_LOGGED:
                _LOGGED.add(name)
                log.warning("ignored the unknown request field %.64r", name)


@cache
def _refused_fields(route: RouteName) -> tuple[tuple[str, RefusedField], ...]:
    """Return the refused fields of a route, each with the field of the body that contains it."""
    fields = (field for field in (*REFUSED, *OTHER_SERVERS) if route in field.routes)
    return tuple((field.name.partition(".")[0], field) for field in fields)


@cache
def _known_names(route: RouteName) -> frozenset[str]:
    """Return the names of a route's fields that the tables have."""
    return frozenset(field_names((*REFUSED, *IGNORED, *OTHER_SERVERS), route))


def field_names(fields: Iterable[IgnoredField | RefusedField], route: RouteName) -> list[str]:
    """Return the names of the table's fields of a route."""
    return [field.name for field in fields if route in field.routes]


def field_states(body: type[RequestFields]) -> dict[str, Literal["yes", "ignored", "refused"]]:
    """Return what a route does with each field, by name; a dot separates an object and its key."""
    states: dict[str, Literal["yes", "ignored", "refused"]] = {}
    states.update(dict.fromkeys(_fields_of(body), "yes"))
    states.update(dict.fromkeys(field_names(IGNORED, body.route), "ignored"))
    states.update(dict.fromkeys(field_names(REFUSED, body.route), "refused"))
    return states


def _fields_of(body: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in body.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields_of(part, f"{name}.")


def _value(body: BaseModel, name: str) -> Any:
    """Return a field of a body, or a key of one of its objects; None if it is absent."""
    value: Any = body
    for part in name.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, part, None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
