"""The table of routes: paths, methods, bodies, answers and handlers.

``app.py`` serves the operations of ``OPERATIONS``, ``openapi.py`` documents them, and ``guards.py``
requires a key for those that are not ``is_open``. docs/developers/add-an-endpoint.md explains how
to add one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import compile_path

from specbuild.runtime.serve import handlers
from specbuild.runtime.serve.anthropic_fields import MessageFields, PromptFields
from specbuild.runtime.serve.api_page import api_document_page
from specbuild.runtime.serve.chat_choice import BatchChatFields, ChatFields
from specbuild.runtime.serve.completions import CompletionFields
from specbuild.runtime.serve.handlers import JSON, Answer
from specbuild.runtime.serve.openapi import Schema, object_schema, openapi_document
from specbuild.runtime.serve.request_fields import RequestFields
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields

if TYPE_CHECKING:
    from specbuild.runtime.serve.app import App

# Called with the application and the body; without a body, with the HTTP request.
Handler: TypeAlias = Callable[["App", Any], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    ``name`` is its operation id in the OpenAPI document, and ``summary`` its description there;
    without a summary it is not documented. ``answer`` is the schema of the answer's body, None if
    that is empty; if the operation ``streams``, the answer may also be server-sent events.
    ``links`` are the names of operations whose path parameter is the ``id`` of this one's answer.
    An operation that ``is_open`` needs no key. One that ``is_page`` belongs to the web page.
    """

    path: str
    method: Literal["get", "post", "delete"] = "get"
    name: str
    handler: Handler
    summary: str = ""
    body: type[RequestFields] | None = None
    answer: Schema | None = None
    media_type: str = JSON
    streams: bool = False
    links: tuple[str, ...] = ()
    is_open: bool = False
    is_page: bool = False


async def document(_app: App, _request: HttpRequest) -> Answer:
    """Return the OpenAPI document."""
    return openapi_document(OPERATIONS)


async def api_page(_app: App, _request: HttpRequest) -> Answer:
    """Return the OpenAPI document as a web page."""
    return Response(api_document_page(openapi_document(OPERATIONS)), media_type="text/html")


_GENERATED = object_schema(
    id="string", object="string", created="integer", model="string", choices="array",
    usage="object",
)  # fmt: skip
_RESPONSE = object_schema(
    id="string", object="string", created_at="integer", status="string", model="string",
    output="array", error="object?", incomplete_details="object?", usage="object?",
)  # fmt: skip
OPERATIONS = (
    Operation(
        path="/v1/completions",
        method="post",
        name="createCompletion",
        summary="Continue prompts of text or token ids",
        handler=handlers.complete,
        body=CompletionFields,
        answer=_GENERATED,
        streams=True,
    ),
    Operation(
        path="/v1/chat/completions",
        method="post",
        name="createChatCompletion",
        summary="Answer a chat",
        handler=handlers.chat,
        body=ChatFields,
        answer=_GENERATED,
        streams=True,
    ),
    Operation(
        path="/v1/chat/completions/batch",
        method="post",
        name="createBatchChatCompletion",
        summary="Answer several chats",
        handler=handlers.batch_chat,
        body=BatchChatFields,
        answer=_GENERATED,
    ),
    Operation(
        path="/v1/messages",
        method="post",
        name="createMessage",
        summary="Answer a chat in the form of Anthropic's API",
        handler=handlers.create_message,
        body=MessageFields,
        answer=object_schema(
            id="string",
            type="string",
            role="string",
            model="string",
            content="array",
            stop_reason="string?",
            stop_sequence="string?",
            usage="object",
        ),
        streams=True,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        method="post",
        name="countMessageTokens",
        summary="Count the tokens of a chat in the form of Anthropic's API",
        handler=handlers.count_message_tokens,
        body=PromptFields,
        answer=object_schema(input_tokens="integer"),
    ),
    Operation(
        path="/v1/responses",
        method="post",
        name="createResponse",
        summary="Create a response",
        handler=handlers.create_response,
        body=ResponseFields,
        answer=_RESPONSE,
        streams=True,
        links=("retrieveResponse", "listInputItems", "deleteResponse", "cancelResponse"),
    ),
    Operation(
        path="/v1/responses/{name}",
        name="retrieveResponse",
        summary="Return a stored response",
        handler=handlers.retrieve_response,
        answer=_RESPONSE,
    ),
    Operation(
        path="/v1/responses/{name}/input_items",
        name="listInputItems",
        summary="List the input of a stored response",
        handler=handlers.list_input_items,
        answer=object_schema(
            object="string", data="array", has_more="boolean", first_id="string?", last_id="string?"
        ),
    ),
    Operation(
        path="/v1/responses/{name}",
        method="delete",
        name="deleteResponse",
        summary="Delete a stored response",
        handler=handlers.delete_response,
        answer=object_schema(id="string", object="string", deleted="boolean"),
    ),
    Operation(
        path="/v1/responses/{name}/cancel",
        method="post",
        name="cancelResponse",
        summary="Cancel a background response",
        handler=handlers.cancel_response,
        answer=_RESPONSE,
    ),
    Operation(
        path="/v1/models",
        name="listModels",
        summary="List the names of the model",
        handler=handlers.list_models,
        answer=object_schema(object="string", data="array"),
    ),
    Operation(
        path="/v1/models/{model:path}",
        name="retrieveModel",
        summary="Describe the model",
        handler=handlers.retrieve_model,
        answer=object_schema(
            id="string", object="string", created="integer", max_model_len="integer"
        ),
    ),
    Operation(
        path="/tokenize",
        method="post",
        name="tokenize",
        summary="Tokenize a text or a chat",
        handler=handlers.tokenize,
        body=TokenizeFields,
        answer=object_schema(tokens="array", count="integer", max_model_len="integer"),
    ),
    Operation(
        path="/detokenize",
        method="post",
        name="detokenize",
        summary="Return the text of token ids",
        handler=handlers.detokenize,
        body=DetokenizeFields,
        answer=object_schema(prompt="string"),
    ),
    Operation(
        path="/tokenizer_info",
        name="tokenizerInfo",
        summary="The configuration of the tokenizer",
        handler=handlers.tokenizer_info,
        answer=object_schema(chat_template="string?"),
    ),
    Operation(
        path="/server_info",
        name="serverInfo",
        summary="The engine and the limits of the server",
        handler=handlers.server_info,
        answer=object_schema(version="string", models="array", max_model_len="integer"),
    ),
    Operation(
        path="/reset_prefix_cache",
        method="post",
        name="resetPrefixCache",
        summary="Let no later request use the pages that are cached now",
        handler=handlers.reset_prefix_cache,
    ),
    Operation(
        path="/livez",
        name="live",
        summary="Whether the process handles requests",
        handler=handlers.live,
        is_open=True,
    ),
    Operation(
        path="/readyz", name="ready", summary="As /health", handler=handlers.health, is_open=True
    ),
    Operation(
        path="/health",
        name="health",
        summary="Whether requests are served",
        handler=handlers.health,
        is_open=True,
    ),
    Operation(
        path="/ping", name="ping", summary="As /health", handler=handlers.health, is_open=True
    ),
    Operation(
        path="/ping",
        method="post",
        name="postPing",
        summary="As /health",
        handler=handlers.health,
        is_open=True,
    ),
    Operation(
        path="/load",
        name="load",
        summary="The number of requests and the cache pages in use",
        handler=handlers.load,
        answer=object_schema(
            server_load="integer", running="integer", waiting="integer", used_pages="number"
        ),
        is_open=True,
    ),
    Operation(
        path="/version",
        name="version",
        summary="The version of specbuild",
        handler=handlers.show_version,
        answer=object_schema(version="string"),
        is_open=True,
    ),
    Operation(
        path="/metrics",
        name="metrics",
        summary="Metrics in Prometheus' text format",
        handler=handlers.metrics,
        answer={"type": "string"},
        media_type="text/plain",
        is_open=True,
    ),
    Operation(path="/openapi.json", name="openapi", handler=document, is_open=True),
    Operation(path="/docs", name="apiPage", handler=api_page, is_open=True),
    Operation(path="/", name="page", handler=handlers.page, is_open=True, is_page=True),
    Operation(
        path="/page/about.json",
        name="pageSettings",
        handler=handlers.page_settings,
        is_open=True,
        is_page=True,
    ),
    Operation(
        path="/page/{name}", name="pageFile", handler=handlers.page_file, is_open=True, is_page=True
    ),
)
_OPEN_PATHS = [compile_path(operation.path)[0] for operation in OPERATIONS if operation.is_open]


def needs_key(path: str) -> bool:
    """Return whether a request to this path needs a key. Unknown paths do."""
    return not any(pattern.match(path) for pattern in _OPEN_PATHS)
