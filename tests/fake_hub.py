"""A server with the API of Hugging Face, for tests of downloads. HF_ENDPOINT names it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """Repositories by id, each a folder. ``requested`` lists the files that were read."""

    repositories: Mapping[str, Path]
    gated: frozenset[str] = frozenset()
    requested: list[str] = field(default_factory=list)
    port: int = 0

    def environment(self, home: Path) -> dict[str, str]:
        """Return environment variables for a process that uses this hub and an empty cache."""
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(home)}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        path = path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        return self._file("/".join(parts[:2]), parts[2:])

    def _api(self, repository: str, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        folder = self.repositories.get(repository)
        if folder is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if rest[:1] == ["tree"]:
            return 200, {}, json.dumps([_entry(folder, file) for file in _files(folder)]).encode()
        if rest[-1:] not in ([], ["main"], [COMMIT]):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        siblings = [{"rfilename": str(file.relative_to(folder))} for file in _files(folder)]
        return 200, {}, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, repository: str, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        name = "/".join(rest[2:])
        if repository not in self.repositories or not name:
            return 404, {}, b"{}"
        self.requested.append(name)
        data = (self.repositories[repository] / name).read_bytes()
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": COMMIT}, data


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _entry(folder: Path, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {
        "type": "file",
        "oid": hashlib.sha1(data).hexdigest(),
        "size": len(data),
        "path": str(file.relative_to(folder)),
    }


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print no line for each request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
