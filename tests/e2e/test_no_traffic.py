"""No command resolves a name, connects to another machine, or writes to the home directory.

No module is loaded that could send telemetry, though ``tokenizers`` depends on one.
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

# Prints the calls that change files at home; at exit, the telemetry switch and all modules.
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
    """The traces of processes whose home directory is the folder ``home``."""

    place: Path
    variables: dict[str, str]

    def started(self, code: str, *commands: Words) -> subprocess.Popen[str]:
        """Start a Python process with the libraries preloaded."""
        words_by_command = [[str(word) for word in words] for words in commands]
        return subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(words_by_command)],
            env=self.variables,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *commands: Words) -> None:
        """Run commands that end by themselves, one after the other in one process."""
        process = self.started(COMMANDS, *commands)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    @property
    def modules(self) -> set[str]:
        """Return the telemetry switch, and the modules that the last process loaded."""
        return set((self.place / "modules").read_text().split())

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Return the network calls of all processes, with hosts or addresses."""
        log = self.place / "network"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(name, host) for name, host in (line.split("\t") for line in lines)]

    def assert_none(self) -> None:
        """Assert that addresses are local and numeric, and that no file was ever written."""
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
    environment = {k: v for k, v in preloaded(*libraries).items() if not k.startswith(switches)}
    cache = str(tmp_path / "cache")
    own = {"HOME": str(tmp_path / "home"), "NETWORK_CALLS": str(tmp_path / "network")}
    return Traces(tmp_path, environment | own | {"SPECBUILD_CACHE_DIR": cache})


RUN = ("--prompt", "ab", "--max-new-tokens", "2", "--json")


def test_commands_have_no_traffic_and_write_no_files(tiny_engine: Path, traces: Traces) -> None:
    run = ("run", tiny_engine, *RUN)
    traces.run(("inspect", tiny_engine), ("check", tiny_engine), run)
    assert {"1", "onnxruntime", "tokenizers", "jinja2"} <= traces.modules
    traces.assert_none()
    assert traces.calls == []


def test_a_server_listens_on_loopback_only(tiny_engine: Path, traces: Traces) -> None:
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


def test_tracing_detects_calls_and_writes(traces: Traces) -> None:
    """Check the tracing itself: a name, an address and a temporary file."""
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


def test_the_user_can_set_the_telemetry_switch(tiny_engine: Path, traces: Traces) -> None:
    switch = {"ORT_DISABLE_TELEMETRY": "0"}
    # No tokens are generated: ONNX Runtime would write to the home directory and send telemetry.
    Traces(traces.place, traces.variables | switch).run(("inspect", tiny_engine))
    assert "0" in traces.modules and "onnxruntime" not in traces.modules
