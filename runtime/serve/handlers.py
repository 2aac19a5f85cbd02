"""The handlers of the routes. Each gets the application and the body, or the HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specbuild.runtime.serve.anthropic_fields import MessageFields, PromptFields
from specbuild.runtime.serve.anthropic_messages import AnthropicMessages
from specbuild.runtime.serve.chat import Chat
from specbuild.runtime.serve.chat_choice import BatchChatFields, ChatFields
from specbuild.runtime.serve.completions import CompletionFields, Completions
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.event_stream import EventStream
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields, TokenRoutes

if TYPE_CHECKING:
    from specbuild.runtime.serve.app import App

JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
# A mapping is sent as JSON, a stream as server-sent events.
Answer: TypeAlias = Mapping[str, Any] | EventStream | Response


async def complete(app: App, body: CompletionFields) -> Answer:
    """Continue prompts."""
    return await Completions(app.serving).answer(body)


async def chat(app: App, body: ChatFields) -> Answer:
    """Answer a chat."""
    return await Chat(app.serving).answer(body)


async def batch_chat(app: App, body: BatchChatFields) -> Answer:
    """Answer several chats, with one choice for each."""
    chats = body.chats()
    app.service.check_admission(len(chats))
    handler = Chat(app.serving)
    tasks = [asyncio.create_task(handler.answer(chat)) for chat in chats]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return body.joined(answers)


async def create_message(app: App, body: MessageFields) -> Answer:
    """Answer a chat in Anthropic's form."""
    return await AnthropicMessages(app.serving).answer(body)


async def count_message_tokens(app: App, body: PromptFields) -> Answer:
    """Count the tokens of a chat in Anthropic's form."""
    return await AnthropicMessages(app.serving).count(body)


async def tokenizer_info(app: App, _request: HttpRequest) -> Answer:
    """Return the configuration of the tokenizer, with its chat template."""
    codec = app.serving.codec
    return {**codec.config, "chat_template": codec.template_source}


async def server_info(app: App, _request: HttpRequest) -> Answer:
    """Return a description of the engine and of the server's limits."""
    engine, options = app.service.engine, app.service.options
    manifest = engine.manifest
    return {
        "version": version("specbuild"),
        "models": list(options.names),
        "model_type": manifest.target.model_type,
        "backend": manifest.backend,
        "drafters": [drafter.kind for drafter in manifest.drafters],
        "max_model_len": manifest.limits.max_seq_len,
        "max_num_seqs": manifest.limits.max_batch_size,
        "max_queue": options.max_queue,
        "max_logprobs": options.max_logprobs,
        "prefix_caching": engine.prefixes is not None,
    }


async def reset_prefix_cache(app: App, _request: HttpRequest) -> Answer:
    """Let no later request use the pages that are cached now."""
    if app.service.engine.prefixes is not None:
        app.service.engine.prefixes.reset()
    return Response()


async def live(_app: App, _request: HttpRequest) -> Answer:
    """Return an empty answer: the process handles requests."""
    return Response()


async def create_response(app: App, body: ResponseFields) -> Answer:
    """Create a response."""
    return await app.responses.answer(body)


async def retrieve_response(app: App, request: HttpRequest) -> Answer:
    """Return a stored response."""
    stored = app.responses.retrieve(request.path_params["name"])
    return Response(stored, media_type=JSON)


async def list_input_items(app: App, request: HttpRequest) -> Answer:
    """Return the input of a stored response."""
    return app.responses.input_items(request.path_params["name"])


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


async def page(app: App, _request: HttpRequest) -> Answer:
    """Return the web page."""
    return app.page.file("index.html")


async def page_settings(app: App, _request: HttpRequest) -> Answer:
    """Return the settings of the web page."""
    return app.page.settings()


async def page_file(app: App, request: HttpRequest) -> Answer:
    """Return a file of the web page."""
    return app.page.file(request.path_params["name"])
