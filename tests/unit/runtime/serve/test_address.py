"""The addresses of a server: it never replaces another server, and answers to known hosts only."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from serve.served import worded

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve import server
from specbuild.runtime.serve.app import App, AppOptions
from specbuild.runtime.serve.server import Address, serve
from specbuild.runtime.serve.service import ServiceOptions


def test_rejects_the_socket_of_a_running_server(tmp_path: Path) -> None:
    address = Address(uds=tmp_path / "socket")
    first = address.listen()
    for _ in range(2):
        with pytest.raises(RequestError, match="another server listens on it"):
            address.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(address.uds))
        assert first.accept()
    first.close()
    # The file is left behind, as by a server that was killed.
    address.listen().close()


def test_a_running_server_with_a_full_backlog_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    clients = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(0)
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            clients.append(client)
            if client.connect_ex(str(path)):
                break
        with pytest.raises(RequestError, match="another server"):
            Address(uds=path).listen()
    for client in clients:
        client.close()


def test_rejects_a_file_that_is_not_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(RequestError, match="cannot listen on"):
        Address(uds=path).listen()
    assert path.read_text() == "mine"


def test_rejects_a_port_that_another_process_has_bound() -> None:
    with Address(port=0).listen() as first, pytest.raises(RequestError, match="cannot listen on"):
        Address(port=first.getsockname()[1]).listen()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_removes_only_its_own_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    path, notifications = tmp_path / "socket", []
    options = AppOptions(service=ServiceOptions(names=("toy",)), output_format=None)
    sockets, other = [], socket.socket(socket.AF_UNIX)

    original = server.Server

    def build(*arguments: object, **named: object) -> server.Server:
        sockets.append(original(*arguments, **named))  # type: ignore[arg-type]
        return sockets[0]

    def ready(_: object) -> None:
        if replaced:
            path.unlink()
            other.bind(str(path))
        sockets[0].should_exit = True

    monkeypatch.setattr(server, "Server", build)
    thread = threading.Thread(
        target=serve,
        args=(App(worded(), options), Address(uds=path)),
        kwargs={"ready": ready, "notify": notifications.append},
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and path.exists() is replaced
    assert notifications == ["shutting down: no request is open"]
    other.close()


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        (Address(), {"localhost", "127.0.0.1", "[::1]"}),
        (Address(host="127.0.0.2"), {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}),
        (Address(host="::1"), {"localhost", "127.0.0.1", "[::1]", "::1"}),
        (Address(host="0.0.0.0"), set()),
        (Address(host="10.0.0.1"), set()),
        (Address(uds=Path("socket")), set()),
    ],
)
def test_loopback_addresses_answer_to_their_names(address: Address, hosts: set[str]) -> None:
    assert set(address.default_hosts) == hosts
