"""The routes of a server, as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specbuild.runtime.engine import Engine
from specbuild.runtime.serve.chat import Chat, ChatFields
from specbuild.runtime.serve.completions import CompletionFields, Completions
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.guards import Failures, Hosts, Keys
from specbuild.runtime.serve.http import Endpoint
from specbuild.runtime.serve.openapi import openapi_document
from specbuild.runtime.serve.parsers.registry import ParserForm
from specbuild.runtime.serve.request_record import REQUEST_ID_HEADER, RequestRecords
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.responses.route import Responses
from specbuild.runtime.serve.service import Service, ServiceOptions
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields, TokenRoutes
from specbuild.runtime.serve.web_page import WebPage

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How an engine is served, and to whom.

    Without ``keys`` everybody is served. ``origins`` are those whose pages may call (CORS).
    ``hosts`` are those that a ``Host`` header may name; none: any.
    ``page``: the page at ``/`` is there.
    """

    service: ServiceOptions
    form: ParserForm | None
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    log_requests: bool = False
    page: bool = True


class App:
    """The application; :attr:`service` is there once it has started."""

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self._engine = engine
        self._options = options
        self._serving: Serving | None = None
        self._responses: Responses | None = None
        routes = [*self._routes(), *self._page()]
        self.asgi = Starlette(
            routes=routes,
            middleware=self._layers(routes),
            exception_handlers={HTTPException: _no_route},  # type: ignore[dict-item]
            lifespan=self._lifespan,
        )

    def _layers(self, routes: Sequence[Route]) -> list[Middleware]:
        """The middleware, the outermost first."""
        options = self._options
        layers = [
            Middleware(RequestRecords, routes=routes, count=self._count, log=options.log_requests),
            Middleware(Failures),
        ]
        if options.hosts:
            layers.append(Middleware(Hosts, allowed=options.hosts))
        if options.origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(options.origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER],
            )
            layers.append(cors)
        return [*layers, Middleware(Keys, keys=options.keys)]

    def _count(self, method: str, handler: str, status: int) -> None:
        if self._serving is not None:
            self.service.metrics.count_http(method, handler, status)

    @property
    def serving(self) -> Serving:
        """What routes stand on."""
        assert self._serving is not None, "the application has not started"
        return self._serving

    @property
    def responses(self) -> Responses:
        """What answers, and keeps, responses."""
        assert self._responses is not None, "the application has not started"
        return self._responses

    @property
    def service(self) -> Service:
        """The engine's service."""
        return self.serving.service

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self._serving is not None:
            self.service.draining = True

    def is_stopped(self, timeout_s: float) -> bool:
        """Wait for the engine's thread. Return False if it still runs after the timeout."""
        return self._engine.session.join(timeout_s)

    def close(self) -> None:
        """End the processes that the application started, also where it was not shut down."""
        if self._serving is not None:
            self.service.close()

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        service = Service(self._engine, self._options.service)
        self._serving = Serving(service, self._options.form)
        self._responses = Responses(self._serving)
        yield
        self.drain()
        await self._responses.close()
        await service.drained()

    def _routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/v1/completions", Endpoint(CompletionFields, self._completion), methods=post),
            Route("/v1/chat/completions", Endpoint(ChatFields, self._chat), methods=post),
            Route("/v1/responses", Endpoint(ResponseFields, self._respond), methods=post),
            Route("/v1/responses/{name}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{name}/cancel", self._cancel, methods=post),
            Route("/tokenize", Endpoint(TokenizeFields, self._tokenize), methods=post),
            Route("/detokenize", Endpoint(DetokenizeFields, self._detokenize), methods=post),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
        ]

    def _page(self) -> list[Route]:
        if not self._options.page:
            return []
        text = self._engine.text
        chat = self._options.form is not None and text is not None and text.has_template
        return WebPage(chat=chat, key=bool(self._options.keys)).routes()

    async def _completion(self, body: CompletionFields) -> Any:
        return await Completions(self.serving).answer(body)

    async def _chat(self, body: ChatFields) -> Any:
        return await Chat(self.serving).answer(body)

    async def _respond(self, body: ResponseFields) -> Any:
        return await self.responses.answer(body)

    async def _response(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return JSONResponse(await self.responses.delete(name))
        return Response(self.responses.retrieve(name), media_type="application/json")

    async def _cancel(self, request: HttpRequest) -> Response:
        response = await self.responses.cancel(request.path_params["name"])
        return Response(response, media_type="application/json")

    async def _tokenize(self, body: TokenizeFields) -> Mapping[str, Any]:
        return await TokenRoutes(self.serving).tokenize(body)

    async def _detokenize(self, body: DetokenizeFields) -> Mapping[str, Any]:
        return await TokenRoutes(self.serving).detokenize(body)

    async def _models(self, _request: HttpRequest) -> Response:
        names = self._options.service.names
        return JSONResponse({"object": "list", "data": [self._about(name) for name in names]})

    async def _model(self, request: HttpRequest) -> Response:
        return JSONResponse(self._about(self.serving.model(request.path_params["model"])))

    def _about(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.service.started_s,
            "owned_by": "specbuild",
            "root": self._options.service.names[0],
            "parent": None,
            "max_model_len": self._engine.manifest.limits.max_seq_len,
        }

    async def _health(self, _request: HttpRequest) -> Response:
        if self.service.failure is not None:
            raise ApiError(503, f"the engine failed: {self.service.failure}")
        if self.service.draining:
            raise ApiError(503, "the server is shutting down")
        return Response()

    async def _load(self, _request: HttpRequest) -> Response:
        return JSONResponse({"server_load": self.service.open_requests} | asdict(self.service.load))

    async def _openapi(self, _request: HttpRequest) -> Response:
        return JSONResponse(openapi_document())

    async def _version(self, _request: HttpRequest) -> Response:
        return JSONResponse({"version": version("specbuild")})

    async def _metrics(self, _request: HttpRequest) -> Response:
        return Response(self.service.exposed_metrics(), media_type=_METRICS_TYPE)


async def _no_route(request: HttpRequest, error: HTTPException) -> Response:
    """What Starlette refuses by itself, in the form of all refusals."""
    if error.status_code == 405:
        said = f"{request.method} is not for this path"
    else:
        said = "there is no such path; GET /openapi.json lists those there are"
    refusal = ApiError(error.status_code, said)
    return JSONResponse(refusal.body, refusal.status, error.headers)
