"""``specbuild serve``: the command, OpenAI's client, and answers equal to ``run``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from command_line import Command, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from trace_replay import replay

PROMPT = "def area(r):"


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Return a server in a separate process, and its address."""
    command = [sys.executable, "-m", "specbuild.cli.main", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with serving(process) as url:
        yield process, url


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--no-spec",), marks=pytest.mark.slow),
        ("--exact", "--prefill-rows-per-turn", "3", "--device", "cpu"),
    ],
)
def test_openai_client_gets_the_answers_of_run(
    tiny_engine: Path, command: Command, options: tuple[str, ...]
) -> None:
    run = ("run", tiny_engine, "--json", "--max-new-tokens", "40", "--prompt", PROMPT)
    raw, chat = (command(*run, *rest).records[0]["text"] for rest in (("--raw",), ()))
    with server(str(tiny_engine), "--served-model-name", "tiny", *options) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        fields = {"model": "tiny", "max_tokens": 40, "temperature": 0}
        text = fields | {"prompt": PROMPT}
        assert client.completions.create(**text).choices[0].text == raw
        chunks = list(client.completions.create(**text, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == raw
        chat_fields = fields | {"messages": [{"role": "user", "content": PROMPT}]}
        assert client.chat.completions.create(**chat_fields).choices[0].message.content == chat
        pieces = list(client.chat.completions.create(**chat_fields, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == chat
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**(text | {"model": "other"}))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def test_a_signal_lets_running_requests_finish(tiny_engine: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    named = ("--served-model-name", "tiny", "--trace", str(trace), "--log-requests")
    with server(str(tiny_engine), *named) as (process, url):
        elsewhere = httpx.get(f"{url}/health", headers={"Host": "elsewhere.example"})
        assert elsewhere.status_code == 403
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(300) == 0
        assert process.stderr is not None
        lines = process.stderr.read()
        assert "route=/v1/completions status=200 prompt_tokens=" in lines
        assert "output_tokens=60 ttft_ms=" in lines
    assert replay(trace.read_text().splitlines()).events["finish"] == 1


@pytest.mark.parametrize("between_s", [0.0, 0.02, 0.3])
def test_a_second_signal_ends_streams_with_an_error(tiny_engine: Path, between_s: float) -> None:
    """The signal may also arrive during a launch: the process must not crash."""
    # The sequences, two at a time, take longer than the time between the signals.
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": None, "ignore_eos": True, "n": 100}
    with server(str(tiny_engine), "--served-model-name", "tiny") as (process, url):
        assert process.stderr is not None
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            message = process.stderr.readline()
            assert "1 request left" in message and "ctrl-C again" in message
            time.sleep(between_s)
            process.send_signal(signal.SIGINT)
            *_, error, done = [line for line in lines if line]
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert process.wait(60) == 0
        assert process.stderr.read() == "aborting 1 request\n"


def test_run_writes_a_trace_of_its_pages(
    tiny_engine: Path, command: Command, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    command("run", tiny_engine, "--prompt", PROMPT, "--max-new-tokens", 9, "--trace", trace)
    replayed = replay(trace.read_text().splitlines())
    assert replayed.events["finish"] == 1 and replayed.most_held["full"] > 0
    nowhere = tmp_path / "none" / "trace"
    refusal = command("run", tiny_engine, "--prompt", PROMPT, "--trace", nowhere)
    assert refusal.refused("the trace cannot be written")


def test_rejects_invalid_options_before_serving(
    tiny_engine: Path, command: Command, tmp_path: Path
) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n")
    refused = {
        "holds no key": ("--api-key-file", empty),
        "No such file": ("--chat-template", tmp_path / "none"),
        "cannot listen on": ("--host", "203.0.113.1", "--api-key", "k"),
        "cannot be combined": ("--reasoning-parser", "harmony", "--tool-call-parser", "hermes"),
        "needs the token <|start|>": ("--reasoning-parser", "harmony"),
        "--reasoning-parser is 'other'": ("--reasoning-parser", "other"),
        "was built for cpu, not for cuda:1": ("--device", "cuda:1"),
        "only engines for cuda take a number": ("--device", "cpu:0"),
        "--exact decodes without a draft": ("--exact", "--draft-depth", "1"),
        "--no-spec contradicts": ("--no-spec", "--draft-depth", "1"),
        "manifest": ("--pin", "0" * 64),
        "is no Ed25519 public key": ("--verify-key", empty),
        "a page of full takes": ("--page-bytes", "full=1"),
    }
    for message, options in refused.items():
        assert command("serve", tiny_engine, *options).refused(message)
