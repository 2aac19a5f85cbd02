"""The web page at ``/``: a chat with the model. All of its files are in this package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from starlette.responses import JSONResponse, Response

from specbuild.runtime.serve.errors import ApiError

FOLDER = "page"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Only the page's own files are loaded and run, no other page may frame it, and text of a model
# cannot become HTML.
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
    """The files of the page, which are served without a key.

    ``has_chat``: the engine has a chat template. ``has_draft``: it has a drafter, whose tokens the
    page tints. ``needs_key``: the page must ask for an API key.
    """

    def __init__(self, *, has_chat: bool, has_draft: bool, needs_key: bool) -> None:
        self._settings: Mapping[str, Any] = {
            "chat": has_chat,
            "draft": has_draft,
            "key": needs_key,
        }
        folder = files(__package__) / FOLDER
        self._files = {file.name: file.read_bytes() for file in folder.iterdir()}

    def settings(self) -> Response:
        """Return whether there are a chat template and a draft, and whether a key is needed."""
        return JSONResponse(self._settings, headers=_HEADERS)

    def file(self, name: str) -> Response:
        """Return a file. ApiError if there is none of this name."""
        if name not in self._files:
            raise ApiError(404, f"the page has no file {name!r}")
        media_type = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], media_type=media_type, headers=_HEADERS)
