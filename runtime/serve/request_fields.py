"""Request fields of OpenAI's and vLLM's APIs that this server does not act on.

Every other field of these APIs is a field of a route's pydantic model. A field that would change
the output is refused by name; a field that cannot change it is ignored, with the reason here.
``docs/write_request_fields.py`` writes the table of all fields into docs/request-fields.md.

A field that neither API defines has no meaning that could be lost. Such fields are ignored, and the
server logs each name once. Some names that other servers give a meaning are refused too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from specbuild.runtime.serve.errors import not_offered

Item = TypeVar("Item")
# Of a list only the first wrong item is an error: an error of each would take a kilobyte.
Listed = Annotated[list[Item], Field(fail_fast=True)]
Route = Literal["completions", "chat", "responses", "tokenize", "detokenize"]
GENERATION: tuple[Route, ...] = ("completions", "chat", "responses")
TEXT: tuple[Route, ...] = ("completions", "chat")
CHATS: tuple[Route, ...] = ("chat", "tokenize")
_COMPLETIONS: tuple[Route, ...] = ("completions",)
_CHAT: tuple[Route, ...] = ("chat",)
_RESPONSES: tuple[Route, ...] = ("responses",)
# Unknown field names that the log has mentioned, and how many it mentions at most.
_LOGGED: set[str] = set()
_MAX_LOGGED = 100
log = logging.getLogger("specbuild.serve")


@dataclass(frozen=True)
class Ignored:
    """A field without effect on the output; ``name`` has a dot before a key of an object."""

    name: str
    routes: tuple[Route, ...]
    reason: str


@dataclass(frozen=True)
class Refused:
    """A field that would change the output; values in ``neutral``, and null, request nothing."""

    name: str
    routes: tuple[Route, ...]
    instead: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Return whether a value requests nothing; 0 is not False here."""
        return value is None or any(type(value) is type(n) and value == n for n in self.neutral)


_IDENTITY = "identifies the end user to OpenAI"
_CACHE = "the prefix cache needs no hint; cache_salt separates tenants"
_MEDIA = "images, audio and video are refused themselves"
_RENDER = "an option of vLLM's render routes only"
IGNORED = (
    Ignored("user", GENERATION, _IDENTITY),
    Ignored("safety_identifier", GENERATION, _IDENTITY),
    Ignored("service_tier", GENERATION, "price and latency class of OpenAI; see priority"),
    Ignored("access_programs", _RESPONSES, "access to OpenAI's models"),
    Ignored("prompt_cache_key", GENERATION, _CACHE),
    Ignored("prompt_cache_options", GENERATION, _CACHE),
    Ignored("prompt_cache_retention", GENERATION, _CACHE),
    Ignored("metadata", TEXT, "labels of stored completions, which this server does not keep"),
    Ignored("store", TEXT, "this server does not keep chats and completions"),
    Ignored("prediction", _CHAT, "a speed hint; drafts do this without one"),
    Ignored("max_tool_calls", _RESPONSES, "limits OpenAI's built-in tools, which are refused"),
    Ignored("background_options", _RESPONSES, "completion window of OpenAI's background queue"),
    Ignored("image", _RESPONSES, _MEDIA),
    Ignored("media_io_kwargs", CHATS, _MEDIA),
    Ignored("mm_processor_kwargs", ("chat", "responses", "tokenize"), _MEDIA),
    Ignored("session_id", TEXT, "a hint for vLLM's routers"),
    Ignored("stream_interval", TEXT, "only moves the boundaries of chunks"),
    Ignored("return_token_offsets", TEXT, _RENDER),
    Ignored("return_mm_kwargs", TEXT, _RENDER),
    Ignored("spaces_between_special_tokens", TEXT, "concerns tokenizers without tokenizer.json"),
    Ignored("guided_decoding_backend", GENERATION, "there is one backend, llguidance"),
    Ignored("structured_outputs.disable_fallback", GENERATION, "there is no fallback backend"),
    Ignored("stream_options.include_usage", _RESPONSES, "response.completed always has usage"),
)

_BIAS = "bias tokens with logit_bias"
_EXTENSION = "there are no extensions of vLLM here"
_TRANSFER = "prefill and decode run in one server"
_NO_TEMPLATE = "start the server with --chat-template FILE"
_TOOLS = "use tools and tool_choice"
_FORM = "state it in the schema, the pattern or the grammar"
_ROUTED = "the choice of experts is not returned"
_SERVER_SEARCH = "this server runs no tools; pass functions in tools"
REFUSED = (
    # Sampling.
    Refused("use_beam_search", GENERATION, "sample several choices with n", (False,)),
    Refused("length_penalty", GENERATION, "there is no beam search", (1.0, 1)),
    Refused("bad_words", GENERATION, _BIAS, ([],)),
    Refused("allowed_token_ids", GENERATION, _BIAS, ([],)),
    Refused("watermarking", GENERATION, "outputs are not watermarked", (False,)),
    Refused("logits_processors", GENERATION, _EXTENSION, ([],)),
    Refused("vllm_xargs", GENERATION, _EXTENSION, ({},)),
    Refused("repetition_detection", GENERATION, "set a penalty, or end the stream in the client"),
    Refused("thinking_token_budget", GENERATION, "set reasoning_effort or max_tokens", (-1,)),
    Refused("best_of", _CHAT, "request n choices and choose in the client", (1,)),
    # What comes back.
    Refused("prompt_logprobs", GENERATION, "score texts with specbuild verify", (False,)),
    Refused("logprob_token_ids", GENERATION, "request top_logprobs", ([],)),
    Refused("return_tokens_as_token_ids", GENERATION, "set return_token_ids", (False,)),
    Refused("return_token_ids", _RESPONSES, "use chat completions", (False,)),
    Refused("return_draft_tokens", _RESPONSES, "stream a chat or a completion", (False,)),
    Refused("return_prompt_text", _CHAT, "use /tokenize and /detokenize", (False,)),
    Refused("routed_experts_prompt_start", GENERATION, _ROUTED, (0,)),
    Refused("request_id", _RESPONSES, "the server chooses the ids of stored responses"),
    Refused("enable_response_messages", _RESPONSES, "read the items of output", (False,)),
    Refused("stream_options.include_obfuscation", GENERATION, "chunks are not padded", (False,)),
    Refused(
        "stream_options.continuous_usage_stats",
        _RESPONSES,
        "response.completed has usage",
        (False,),
    ),
    Refused("kv_transfer_params", GENERATION, _TRANSFER, ({},)),
    Refused("ec_transfer_params", GENERATION, _TRANSFER, ({},)),
    # Prompts.
    Refused("suffix", _COMPLETIONS, "the model only continues a prompt", ("",)),
    Refused("prompt_embeds", _COMPLETIONS, "send the prompt as text or token ids", ([], "")),
    Refused("chat_template", CHATS, _NO_TEMPLATE),
    Refused("documents", _CHAT, "put documents into messages, or chat_template_kwargs", ([],)),
    Refused("echo", _CHAT, "the client has the last message", (False,)),
    Refused("prompt", _RESPONSES, "stored prompt templates are OpenAI's; send input"),
    Refused("conversation", _RESPONSES, "pass previous_response_id"),
    Refused("context_management", _RESPONSES, "shorten the input", ([],)),
    Refused("previous_input_messages", _RESPONSES, "send the items as input", ([],)),
    Refused("previous_response", _RESPONSES, "pass previous_response_id, or items as input"),
    Refused("continue_final_message", _RESPONSES, "use chat completions", (False,)),
    Refused("add_generation_prompt", _RESPONSES, "use chat completions", (True,)),
    Refused("truncate_prompt_tokens", _RESPONSES, "shorten the input"),
    # What models and servers of OpenAI do beside text.
    Refused("audio", _CHAT, "the model produces text"),
    Refused("moderation", ("chat", "responses"), "outputs are not moderated"),
    Refused("web_search_options", _CHAT, _SERVER_SEARCH),
    Refused("functions", _CHAT, _TOOLS, ([],)),
    Refused("function_call", _CHAT, _TOOLS, ("none",)),
    Refused("verbosity", _CHAT, "ask for a length in the messages", ("medium",)),
    Refused("text.verbosity", _RESPONSES, "ask for a length in the input", ("medium",)),
    # A model without summaries answers "auto" without one.
    Refused("reasoning.summary", _RESPONSES, "reasoning comes as it is", ("auto",)),
    Refused("reasoning.generate_summary", _RESPONSES, "reasoning comes as it is", ("auto",)),
    Refused("reasoning.context", _RESPONSES, "send the reasoning items to keep", ("auto",)),
    Refused("reasoning.mode", _RESPONSES, "set reasoning.effort", ("standard",)),
    # Forms.
    Refused("guided_whitespace_pattern", GENERATION, _FORM),
    Refused("structured_outputs.whitespace_pattern", GENERATION, _FORM),
    Refused("structured_outputs.disable_any_whitespace", GENERATION, _FORM, (False,)),
    Refused("structured_outputs.disable_additional_properties", GENERATION, _FORM, (False,)),
    Refused("structured_outputs.structural_tag", GENERATION, "use a grammar"),
)

# Fields of SGLang, llama.cpp, Text Generation Inference and OpenRouter that change their output.
# They are no part of the documented table: neither OpenAI nor vLLM defines them.
_OTHER_NAME = "use max_tokens and min_tokens"
_OTHER_FORM = "use structured_outputs"
_OTHER_SAMPLER = "use top_p, min_p or a penalty"
_THINKING = "use reasoning_effort or chat_template_kwargs"
ELSEWHERE = (
    *(Refused(name, GENERATION, _OTHER_NAME, (-1,)) for name in ("n_predict", "max_new_tokens")),
    Refused("min_new_tokens", GENERATION, _OTHER_NAME, (0,)),
    *(Refused(name, GENERATION, _OTHER_FORM) for name in ("regex", "ebnf", "json_schema")),
    Refused("grammar", GENERATION, _OTHER_FORM, ("",)),
    *(Refused(name, GENERATION, _OTHER_SAMPLER, (1, 1.0)) for name in ("typical_p", "tfs_z")),
    *(
        Refused(name, GENERATION, _OTHER_SAMPLER, (0, 0.0))
        for name in ("top_a", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range")
    ),
    Refused("top_n_sigma", GENERATION, _OTHER_SAMPLER, (-1, -1.0, 0, 0.0)),
    *(Refused(name, GENERATION, _THINKING) for name in ("enable_thinking", "thinking")),
    Refused("reasoning", TEXT, _THINKING),
    Refused("lora_path", GENERATION, "an engine has one model"),
    Refused("custom_logit_processor", GENERATION, _EXTENSION),
)


class RequestFields(BaseModel):
    """The body of a request to ``route``. Other fields are refused or ignored by the table."""

    model_config = ConfigDict(strict=True, extra="allow")
    route: ClassVar[Route]

    def refuse_unsupported(self) -> None:
        """Raise ApiError for the first field that would change the output; log unknown names."""
        for refused in (*REFUSED, *ELSEWHERE):
            if self.route in refused.routes and not refused.allows(_value(self, refused.name)):
                raise not_offered(refused.name, refused.instead)
        known: list[Ignored | Refused] = [*REFUSED, *IGNORED, *ELSEWHERE]
        for name in set(self.model_extra or ()).difference(listed(known, self.route)):
            if name not in _LOGGED and len(_LOGGED) < _MAX_LOGGED:
                _LOGGED.add(name)
                log.warning("ignored the unknown request field %.64r", name)


def listed(fields: Iterable[Ignored | Refused], route: Route) -> list[str]:
    """Return the names that the table has for a route."""
    return [field.name for field in fields if route in field.routes]


def field_states(body: type[RequestFields]) -> dict[str, Literal["yes", "ignored", "refused"]]:
    """Return what a route does with each field; a dot is before a key of an object."""
    states: dict[str, Literal["yes", "ignored", "refused"]] = {}
    states.update(dict.fromkeys(_fields_of(body), "yes"))
    states.update(dict.fromkeys(listed(IGNORED, body.route), "ignored"))
    states.update(dict.fromkeys(listed(REFUSED, body.route), "refused"))
    return states


def _fields_of(body: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in body.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields_of(part, f"{name}.")


def _value(body: BaseModel, name: str) -> Any:
    """A field of a body, or a key of one of its objects; None where it is absent."""
    value: Any = body
    for part in name.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, part, None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
