"""``specbuild chat``: over pipes, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_target
from command_line import Command

GREEDY = ("--temperature", 0, "--max-new-tokens", 6)
DRAFT = "\x1b[36m"  # cyan
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"

Messages = Sequence[tuple[str, str]]
Reference = Callable[[Messages], str]


@pytest.fixture
def reference(command: Command, tiny_engine: Path, tmp_path: Path) -> Reference:
    """Return a function: the answer of ``run`` without a draft to a list of (role, content)."""

    def answer(messages: Messages) -> str:
        file = tmp_path / "messages.jsonl"
        listed = [{"role": role, "content": content} for role, content in messages]
        file.write_text(json.dumps({"id": "a", "messages": listed}))
        result = command("run", tiny_engine, "--prompts", file, "--no-spec", "--json", *GREEDY)
        return str(result.records[0]["text"])

    return answer


def test_piped_lines_form_a_conversation(
    command: Command, tiny_engine: Path, reference: Reference
) -> None:
    lines = b"Hi\n\n/system Be brief.\nAgain\n/reset\nHi\n"
    result = command("chat", tiny_engine, *GREEDY, stdin=lines)
    assert result.code == 0, result.err
    first = reference([("user", "Hi")])
    turns = [("user", "Hi"), ("assistant", first), ("user", "Again")]
    second = reference([("system", "Be brief."), *turns])
    third = reference([("system", "Be brief."), ("user", "Hi")])
    assert result.out == f"{first}\n{second}\n{third}\n"
    assert len(re.findall(r"^TTFT .* ms, .* tokens/s, 6 tokens, ", result.err, re.MULTILINE)) == 3
    assert "system message: Be brief." in result.err


def test_compares_answers_with_and_without_the_draft(
    command: Command, tiny_engine: Path, reference: Reference
) -> None:
    lines = b"/compare\n/stats\nHi\n/compare\n/stats\n"
    result = command("chat", tiny_engine, *GREEDY, "--draft-depth", 3, stdin=lines)
    assert result.out == f"{reference([('user', 'Hi')])}\n" * 2
    assert "there is no question yet" in result.err
    assert "there is no answer yet" in result.err
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]]
        for line in result.err.splitlines()
        if len(cells := line.split("│")) == 5
    }
    assert rows["tokens"] == ["6", "6"]
    assert rows["target passes"][0] == "5"
    assert int(rows["target passes"][1]) == 5 - int(rows["accepted draft tokens"][1])
    assert rows["accepted draft tokens"][0] == "0"
    assert "1 answers" not in result.err and "1 answer, 6 tokens" in result.err
    plain = command("chat", tiny_engine, *GREEDY, "--no-spec", stdin=b"Hi\n/compare\n")
    assert "the engine has no draft" in plain.err
    assert "accepted from the draft" not in plain.err


def test_unknown_commands_and_long_conversations(command: Command, tiny_engine: Path) -> None:
    result = command(
        "chat", tiny_engine, *GREEDY, stdin=b"/hlp\n/nothing\n" + b"x" * 200 + b"\nHi\n"
    )
    assert result.code == 0
    assert "/hlp is no command; did you mean /help?" in result.err
    assert "/nothing is no command; /help shows the commands" in result.err
    assert "max_seq_len; /reset starts a new conversation" in result.err
    # The rejected question is not part of the conversation.
    alone = command("chat", tiny_engine, *GREEDY, stdin=b"Hi\n")
    assert result.out == alone.out


def test_rejects_an_engine_without_a_tokenizer(command: Command, ids_engine: Path) -> None:
    assert command("chat", ids_engine, stdin=b"Hi\n").refused("has no tokenizer", "specbuild run")
    assert command("chat", ids_engine, "--temperature", -1).refused("temperature")
    assert command("chat", ids_engine, "--max-new-tokens", 0).code == 2


class Terminal:
    """``specbuild chat`` on a pseudo-terminal."""

    def __init__(self, *words: object) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specbuild", "chat", *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": ""},
        )
        os.close(slave)
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, pattern: str, since: int = 0) -> int:
        """Read until the text after ``since`` matches the pattern; return the end of the match."""
        end = time.monotonic() + 120
        while not (match := re.compile(pattern).search(self.text, since)):
            readable, _, _ = select.select([self._master], [], [], end - time.monotonic())
            assert readable, self.text
            try:
                self.text += os.read(self._master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(self.text) from None
        return match.end()


def test_a_terminal_shows_the_draft_and_ctrl_c_stops_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBUILD_CACHE_DIR", str(tmp_path / "cache"))
    # An answer that fills this context takes far longer than the time until ctrl-C.
    long: dict[str, Any] = {"max_positions": 32768, "rope_factor": 64, "eos": (100,)}
    target = tmp_path / "target"
    write_target(target, tokenizer=True, vocab=272, chat_template=TEMPLATE, **long)
    # A model of random weights repeats itself, so suffix decoding proposes tokens.
    options = ("--drafter", "suffix", "--temperature", 0, "--max-new-tokens", 30000)
    terminal = Terminal(target, "--max-seq-len", 32768, *options)
    try:
        place = terminal.read_until("/help shows commands")
        place = terminal.read_until("Tokens of this colour", place)
        place = terminal.read_until("> ", place)
        terminal.write("Hi\n")
        place = terminal.read_until(re.escape(DRAFT), place)
        terminal.process.send_signal(signal.SIGINT)
        place = terminal.read_until(r"accepted from the draft \(\d+ %\), stopped", place)
        terminal.write("/stats\n")
        place = terminal.read_until("abort", place)
        terminal.write("/exit\n")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
