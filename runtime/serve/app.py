"""The ASGI application of a server: its routes and the middleware around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specbuild.runtime.engine import Engine
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.guards import ErrorHandler, HostCheck, KeyCheck
from specbuild.runtime.serve.http import Endpoint
from specbuild.runtime.serve.parsers.output_formats import OutputFormat
from specbuild.runtime.serve.request_record import REQUEST_ID_HEADER, RequestRecords
from specbuild.runtime.serve.responses.handler import Responses
from specbuild.runtime.serve.routes import OPERATIONS, Operation, needs_key
from specbuild.runtime.serve.service import Service, ServiceOptions
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.web_page import WebPage


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """The options of an application.

    ``keys`` are the accepted API keys; without any, no key is needed. Web pages of ``origins`` may
    call the server (CORS). ``hosts`` are the accepted values of the ``Host`` header, empty for any.
    With ``page`` the web page is at ``/``. Request logs are lines of JSON with ``log_json``.
    """

    service: ServiceOptions
    output_format: OutputFormat | None
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    log_requests: bool = False
    log_json: bool = False
    page: bool = True


class App:
    """The application. :attr:`service` exists once it has started.

    ``page`` has the files of the web page.
    """

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self._engine = engine
        self._options = options
        self._serving: Serving | None = None
        self._responses: Responses | None = None
        text = engine.text
        has_chat = options.output_format is not None and text is not None and text.has_template
        self.page = WebPage(
            has_chat=has_chat,
            has_draft=bool(engine.manifest.drafters),
            needs_key=bool(options.keys),
        )
        routes = _routes(self, (o for o in OPERATIONS if options.page or not o.is_page))
        self.asgi = Starlette(
            routes=routes,
            middleware=self._middleware(routes),
            exception_handlers={HTTPException: _starlette_error},  # type: ignore[dict-item]
            lifespan=self._lifespan,
        )

    def _middleware(self, routes: Sequence[Route]) -> list[Middleware]:
        """Return the middleware, the outermost first."""
        options = self._options
        layers = [
            Middleware(
                RequestRecords,
                routes=routes,
                count=self._count,
                log=options.log_requests,
                as_json=options.log_json,
            ),
            Middleware(ErrorHandler),
        ]
        if options.hosts:
            layers.append(Middleware(HostCheck, allowed=options.hosts))
        if options.origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(options.origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER],
            )
            layers.append(cors)
        return [*layers, Middleware(KeyCheck, keys=options.keys, needs_key=needs_key)]

    def _count(self, method: str, handler: str, status: int, duration_s: float) -> None:
        if self._serving is not None:
            self.service.metrics.count_http(method, handler, status, duration_s)

    @property
    def serving(self) -> Serving:
        """The service and its output format, for routes."""
        assert self._serving is not None, "the application has not started"
        return self._serving

    @property
    def responses(self) -> Responses:
        """The handler of responses, which stores them."""
        assert self._responses is not None, "the application has not started"
        return self._responses

    @property
    def service(self) -> Service:
        """The engine's service."""
        return self.serving.service

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self._serving is not None:
            self.service.is_draining = True

    def is_stopped(self, timeout_s: float) -> bool:
        """Wait for the engine's thread. Return False if it still runs after the timeout."""
        return self._engine.session.join(timeout_s)

    def close(self) -> None:
        """End the application's processes, even without a shutdown."""
        if self._serving is not None:
            self.service.close()

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        service = Service(self._engine, self._options.service)
        self._serving = Serving(service, self._options.output_format)
        self._responses = Responses(self._serving)
        yield
        self.drain()
        await self._responses.close()
        await service.drained()


class PathEndpoint:
    """The ASGI application of one path: calls the handler of the request's method."""

    def __init__(self, app: App, operations: Sequence[Operation]) -> None:
        self._app = app
        self._handlers = {o.method.upper(): self._handler(o) for o in operations}
        if "GET" in self._handlers:
            self._handlers["HEAD"] = self._handlers["GET"]
        self.methods = list(self._handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._handlers[scope["method"]](scope, receive, send)

    def _handler(self, operation: Operation) -> ASGIApp:
        handle = partial(operation.handler, self._app)
        if operation.body is not None:
            return Endpoint(operation.body, handle)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            answer = await handle(HttpRequest(scope, receive))
            response = answer if isinstance(answer, Response) else JSONResponse(answer)
            await response(scope, receive, send)

        return respond


def _routes(app: App, operations: Iterable[Operation]) -> list[Route]:
    """Return a route for each path. Starlette answers 405 for other methods of a path."""
    operations_by_path: dict[str, list[Operation]] = {}
    for operation in operations:
        operations_by_path.setdefault(operation.path, []).append(operation)
    routes = []
    for path, path_operations in operations_by_path.items():
        endpoint = PathEndpoint(app, path_operations)
        routes.append(Route(path, endpoint, methods=endpoint.methods))
    return routes


async def _starlette_error(request: HttpRequest, error: HTTPException) -> Response:
    """Return an error of Starlette, such as 404, as OpenAI's error object."""
    if error.status_code == 405:
        message = f"this path does not have the method {request.method}"
    else:
        message = "there is no such path; GET /openapi.json lists all paths"
    api_error = ApiError(error.status_code, message)
    return JSONResponse(api_error.body, api_error.status, error.headers)
