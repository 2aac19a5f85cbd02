"""The page at ``/``: a chat with the model, made of this package's files alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specbuild.runtime.serve.errors import ApiError

FOLDER = "page"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing but the page's own files runs or is shown, no other page may frame it, and no text of a
# model can become HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class WebPage:
    """The page's routes, which are open to everybody.

    ``chat``: the engine has a chat template. ``key``: the API wants one, which the page asks for.
    """

    def __init__(self, *, chat: bool, key: bool) -> None:
        self._about: Mapping[str, Any] = {"chat": chat, "key": key}
        folder = files(__package__) / FOLDER
        self._files = {file.name: file.read_bytes() for file in folder.iterdir()}

    def routes(self) -> list[Route]:
        """``/`` and what the page is made of."""
        return [
            Route("/", self._index),
            Route(f"/{FOLDER}/about.json", self._say),
            Route(f"/{FOLDER}/{{name}}", self._file),
        ]

    async def _index(self, _request: HttpRequest) -> Response:
        return self._answer("index.html")

    async def _say(self, _request: HttpRequest) -> Response:
        return JSONResponse(self._about, headers=_HEADERS)

    async def _file(self, request: HttpRequest) -> Response:
        return self._answer(request.path_params["name"])

    def _answer(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, f"the page has no file {name!r}")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], media_type=kind, headers=_HEADERS)
