"""No command resolves a name, reaches another machine, or writes under the home directory.

Nor is anything loaded that could call home, though ``tokenizers`` brings it along.
"""

from __future__ import annotations

import ipaddress
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from command_line import serving
from faults.interposition import COMPILER, compiled, preloaded

# Tells the calls that change files at home, then the switch of telemetry and all modules at exit.
COMMANDS = """
import json, os, sys
from pathlib import Path
from command_line import serving
from faults.interposition import NONE, interpose
home = Path(os.environ["HOME"])
interpose(home, NONE, log=os.open(home.parent / "written", os.O_CREAT | os.O_WRONLY))
from specbuild.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
told = " ".join([os.environ.get("ORT_DISABLE_TELEMETRY", ""), *sys.modules])
(home.parent / "modules").write_text(told)
sys.exit(max(codes))
"""
Words = Sequence[object]
CALLERS = {"huggingface_hub", "hf_xet", "httpx", "httpx2", "requests", "urllib3", "aiohttp"}
NETWORK_CALLS = Path(__file__).parents[1] / "network_calls.c"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, cc")


@dataclass(frozen=True)
class Traces:
    """What processes at home leave: it is the folder ``home`` of a place of its own."""

    place: Path
    variables: dict[str, str]

    def started(self, code: str, *commands: Words) -> subprocess.Popen[str]:
        """A Python process that has the libraries in front."""
        given = [[str(word) for word in words] for words in commands]
        return subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(given)],
            env=self.variables,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *commands: Words) -> None:
        """Commands that end by themselves, one after the other in a process."""
        process = self.started(COMMANDS, *commands)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said

    @property
    def modules(self) -> set[str]:
        """The switch of telemetry, and what the last process had loaded."""
        return set((self.place / "modules").read_text().split())

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Calls of the network by all of them, and the hosts or addresses."""
        log = self.place / "network"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(name, host) for name, host in (line.split("\t") for line in lines)]

    def assert_none(self) -> None:
        """Only numeric addresses of this machine; nothing written at home, not even for a time."""
        assert [call for call in self.calls if not _is_loopback(call[1])] == []
        assert (self.place / "written").read_text() == ""
        assert not list((self.place / "home").iterdir())
        assert not CALLERS & self.modules


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    (tmp_path / "home").mkdir()
    libraries = (compiled(tmp_path), compiled(tmp_path, NETWORK_CALLS))
    switches = ("ORT_", "XDG_")
    kept = {k: v for k, v in preloaded(*libraries).items() if not k.startswith(switches)}
    cache = str(tmp_path / "cache")
    ours = {"HOME": str(tmp_path / "home"), "NETWORK_CALLS": str(tmp_path / "network")}
    return Traces(tmp_path, kept | ours | {"SPECBUILD_CACHE_DIR": cache})


RUN = ("--prompt", "ab", "--max-new-tokens", "2", "--json")


def test_commands_send_and_leave_nothing(tiny_engine: Path, traces: Traces) -> None:
    run = ("run", tiny_engine, *RUN)
    traces.run(("inspect", tiny_engine), ("check", tiny_engine), run)
    assert {"1", "onnxruntime", "tokenizers", "jinja2"} <= traces.modules
    traces.assert_none()
    assert traces.calls == []


def test_a_server_listens_at_home_and_calls_nobody(tiny_engine: Path, traces: Traces) -> None:
    process = traces.started(COMMANDS, ("serve", tiny_engine, "--port", "0"))
    chat = {
        "model": tiny_engine.name,
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 2,
    }
    with serving(process) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert {"1", "onnxruntime", "uvicorn", "pydantic"} <= traces.modules
    traces.assert_none()
    assert ("bind", "127.0.0.1") in traces.calls


def test_calls_and_writes_are_seen(traces: Traces) -> None:
    """The test's own eyes: a name, an address and a file for a moment."""
    code = COMMANDS.partition("from specbuild")[0] + (
        "import socket\n"
        "with socket.socket(type=socket.SOCK_DGRAM) as s: s.connect(('203.0.113.1', 9))\n"
        "try: socket.getaddrinfo('home.invalid', 80)\n"
        "except OSError: pass\n"
        "(home / 'device').write_text('id'); (home / 'device').unlink()\n"
    )
    assert traces.started(code).wait(300) == 0
    assert traces.calls == [("connect", "203.0.113.1"), ("getaddrinfo", "home.invalid")]
    written = (traces.place / "written").read_text().splitlines()
    assert [line.partition("\t")[0] for line in written] == ["open", "write", "unlink"]
    assert not any(_is_loopback(host) for _, host in traces.calls)


def test_the_switch_is_the_users(tiny_engine: Path, traces: Traces) -> None:
    switch = {"ORT_DISABLE_TELEMETRY": "0"}
    # Nothing is decoded: ONNX Runtime would write at home, and what else is not ours to try.
    Traces(traces.place, traces.variables | switch).run(("inspect", tiny_engine))
    assert "0" in traces.modules and "onnxruntime" not in traces.modules
