"""The table of routes: paths, methods, bodies, answers and handlers.

``app.py`` serves the operations of ``OPERATIONS``, ``openapi.py`` documents them, and ``guards.py``
requires a key for those that are not ``is_open``. docs/developers/add-an-endpoint.md explains how
to add one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import compile_path

from specbuild.runtime.serve.chat import Chat
from specbuild.runtime.serve.chat_choice import ChatFields
from specbuild.runtime.serve.completions import CompletionFields, Completions
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import Chunks
from specbuild.runtime.serve.openapi import Schema, object_schema, openapi_document
from specbuild.runtime.serve.request_fields import RequestFields
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields, TokenRoutes

if TYPE_CHECKING:
    from specbuild.runtime.serve.app import App

JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
# A mapping is sent as JSON, chunks as server-sent events.
Answer: TypeAlias = Mapping[str, Any] | Chunks | Response
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


async def complete(app: App, body: CompletionFields) -> Answer:
    """Continue prompts."""
    return await Completions(app.serving).answer(body)


async def chat(app: App, body: ChatFields) -> Answer:
    """Answer a chat."""
    return await Chat(app.serving).answer(body)


async def create_response(app: App, body: ResponseFields) -> Answer:
    """Create a response."""
    return await app.responses.answer(body)


async def retrieve_response(app: App, request: HttpRequest) -> Answer:
    """Return a stored response."""
    stored = app.responses.retrieve(request.path_params["name"])
    return Response(stored, media_type=JSON)


async def delete_response(app: App, request: HttpRequest) -> Answer:
    """Delete a stored response."""
    return await app.responses.delete(request.path_params["name"])


async def cancel_response(app: App, request: HttpRequest) -> Answer:
    """Cancel a background response."""
    response = await app.responses.cancel(request.path_params["name"])
    return Response(response, media_type=JSON)


async def list_models(app: App, _request: HttpRequest) -> Answer:
    """Return a description of the model for each of its names."""
    names = app.service.options.names
    return {"object": "list", "data": [_model(app, name) for name in names]}


async def retrieve_model(app: App, request: HttpRequest) -> Answer:
    """Return a description of the model."""
    return _model(app, app.serving.model(request.path_params["model"]))


def _model(app: App, name: str) -> Mapping[str, Any]:
    service = app.service
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "specbuild",
        "root": service.options.names[0],
        "parent": None,
        "max_model_len": service.engine.manifest.limits.max_seq_len,
    }


async def tokenize(app: App, body: TokenizeFields) -> Answer:
    """Tokenize a text or a chat."""
    return await TokenRoutes(app.serving).tokenize(body)


async def detokenize(app: App, body: DetokenizeFields) -> Answer:
    """Return the text of token ids."""
    return await TokenRoutes(app.serving).detokenize(body)


async def health(app: App, _request: HttpRequest) -> Answer:
    """Return an empty answer. ApiError if the engine failed or the server shuts down."""
    if app.service.failure is not None:
        raise ApiError(503, f"the engine failed: {app.service.failure}")
    if app.service.is_draining:
        raise ApiError(503, "the server is shutting down")
    return Response()


async def load(app: App, _request: HttpRequest) -> Answer:
    """Return the number of requests and the cache pages in use."""
    return {"server_load": app.service.open_requests} | asdict(app.service.load)


async def show_version(_app: App, _request: HttpRequest) -> Answer:
    """Return the version of specbuild."""
    return {"version": version("specbuild")}


async def metrics(app: App, _request: HttpRequest) -> Answer:
    """Return the metrics in Prometheus' text format."""
    return Response(app.service.exposed_metrics(), media_type=METRICS)


async def document(_app: App, _request: HttpRequest) -> Answer:
    """Return the OpenAPI document."""
    return openapi_document(OPERATIONS)


async def page(app: App, _request: HttpRequest) -> Answer:
    """Return the web page."""
    return app.page.file("index.html")


async def page_settings(app: App, _request: HttpRequest) -> Answer:
    """Return the settings of the web page."""
    return app.page.settings()


async def page_file(app: App, request: HttpRequest) -> Answer:
    """Return a file of the web page."""
    return app.page.file(request.path_params["name"])


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
        handler=complete,
        body=CompletionFields,
        answer=_GENERATED,
        streams=True,
    ),
    Operation(
        path="/v1/chat/completions",
        method="post",
        name="createChatCompletion",
        summary="Answer a chat",
        handler=chat,
        body=ChatFields,
        answer=_GENERATED,
        streams=True,
    ),
    Operation(
        path="/v1/responses",
        method="post",
        name="createResponse",
        summary="Create a response",
        handler=create_response,
        body=ResponseFields,
        answer=_RESPONSE,
        streams=True,
        links=("retrieveResponse", "deleteResponse", "cancelResponse"),
    ),
    Operation(
        path="/v1/responses/{name}",
        name="retrieveResponse",
        summary="Return a stored response",
        handler=retrieve_response,
        answer=_RESPONSE,
    ),
    Operation(
        path="/v1/responses/{name}",
        method="delete",
        name="deleteResponse",
        summary="Delete a stored response",
        handler=delete_response,
        answer=object_schema(id="string", object="string", deleted="boolean"),
    ),
    Operation(
        path="/v1/responses/{name}/cancel",
        method="post",
        name="cancelResponse",
        summary="Cancel a background response",
        handler=cancel_response,
        answer=_RESPONSE,
    ),
    Operation(
        path="/v1/models",
        name="listModels",
        summary="List the names of the model",
        handler=list_models,
        answer=object_schema(object="string", data="array"),
    ),
    Operation(
        path="/v1/models/{model:path}",
        name="retrieveModel",
        summary="Describe the model",
        handler=retrieve_model,
        answer=object_schema(
            id="string", object="string", created="integer", max_model_len="integer"
        ),
    ),
    Operation(
        path="/tokenize",
        method="post",
        name="tokenize",
        summary="Tokenize a text or a chat",
        handler=tokenize,
        body=TokenizeFields,
        answer=object_schema(tokens="array", count="integer", max_model_len="integer"),
    ),
    Operation(
        path="/detokenize",
        method="post",
        name="detokenize",
        summary="Return the text of token ids",
        handler=detokenize,
        body=DetokenizeFields,
        answer=object_schema(prompt="string"),
    ),
    Operation(
        path="/health",
        name="health",
        summary="Whether requests are served",
        handler=health,
        is_open=True,
    ),
    Operation(path="/ping", name="ping", summary="As /health", handler=health, is_open=True),
    Operation(
        path="/ping",
        method="post",
        name="postPing",
        summary="As /health",
        handler=health,
        is_open=True,
    ),
    Operation(
        path="/load",
        name="load",
        summary="The number of requests and the cache pages in use",
        handler=load,
        answer=object_schema(
            server_load="integer", running="integer", waiting="integer", used_pages="number"
        ),
        is_open=True,
    ),
    Operation(
        path="/version",
        name="version",
        summary="The version of specbuild",
        handler=show_version,
        answer=object_schema(version="string"),
        is_open=True,
    ),
    Operation(
        path="/metrics",
        name="metrics",
        summary="Metrics in Prometheus' text format",
        handler=metrics,
        answer={"type": "string"},
        media_type="text/plain",
        is_open=True,
    ),
    Operation(path="/openapi.json", name="openapi", handler=document, is_open=True),
    Operation(path="/", name="page", handler=page, is_open=True, is_page=True),
    Operation(
        path="/page/about.json",
        name="pageSettings",
        handler=page_settings,
        is_open=True,
        is_page=True,
    ),
    Operation(path="/page/{name}", name="pageFile", handler=page_file, is_open=True, is_page=True),
)
_OPEN_PATHS = [compile_path(operation.path)[0] for operation in OPERATIONS if operation.is_open]


def needs_key(path: str) -> bool:
    """Return whether a request to this path needs a key. Unknown paths do."""
    return not any(pattern.match(path) for pattern in _OPEN_PATHS)
