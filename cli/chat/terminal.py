"""The chat in a terminal or over pipes: lines in, answers out, commands that begin with a slash."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbuild.cli.chat.conversation import Answer, Conversation
from specbuild.cli.tables.run_table import milliseconds, run_table
from specbuild.cli.terminal.token_stream import DRAFT_STYLE, TokenStream
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import TokenEvent

_PROMPT = "> "
_CONTINUED = "… "
HELP = {
    "/help": "show these commands",
    "/system TEXT": "set the system message; without TEXT show it, with - remove it",
    "/reset": "forget the conversation, keep the system message",
    "/stats": "statistics of the last answer, and totals",
    "/compare": "the last answer again, without and with the draft: times side by side",
    "/exit": "leave, as ctrl-D does",
}


class ChatTerminal:
    """Reads lines, shows answers. Answers go to standard output, everything else to ``console``.

    On a terminal accepted draft tokens have a colour of their own.
    """

    def __init__(
        self, conversation: Conversation, console: Console, *, raw_terminal: bool = False
    ) -> None:
        self._chat = conversation
        self._console = console
        self._raw_terminal = raw_terminal
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._show_help(),
            "/system": self._set_system,
            "/reset": lambda _: self._reset(),
            "/stats": lambda _: self._show_stats(),
            "/compare": lambda _: self._compare(),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line until there are no more, or one is ``/exit``."""
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if not text:
                continue
            try:
                if text.startswith("/"):
                    self._command(text)
                else:
                    self._ask(text)
            except RequestError as error:
                self._say(str(error))

    def greet(self, title: str) -> None:
        """Name the model and the commands, and the colour of draft tokens where there is one."""
        limit = self._chat.engine.manifest.limits.max_seq_len
        self._say(f"{title}, {limit} tokens of context. /help shows commands, ctrl-D leaves.")
        if self._chat.has_draft and Console(file=sys.stdout).color_system is not None:
            legend = Text("Tokens of this colour", style=DRAFT_STYLE)
            self._console.print(legend.append(" were accepted from the draft.", style="default"))

    def _ask(self, question: str) -> None:
        stream = self._stream()
        try:
            answer = self._chat.ask(question, _printer(stream))
        except RequestError as error:
            raise RequestError(f"{error}; /reset starts a new conversation") from error
        stream.finish(0, answer.text)
        self._say(answer_line(answer, self._chat.has_draft), dim=True)

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        action = self._actions.get(name)
        if action is None:
            near = difflib.get_close_matches(name, self._actions, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help shows the commands"
            raise RequestError(f"{name} is no command; {hint}")
        action(rest.strip())

    def _show_help(self) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, meaning in HELP.items():
            table.add_row(name, meaning)
        self._console.print(table)
        self._say("ctrl-C stops an answer. A line that ends with \\ continues on the next line.")

    def _set_system(self, text: str) -> None:
        if text:
            self._chat.system = None if text == "-" else text
        self._say(f"system message: {self._chat.system or 'none'}")

    def _reset(self) -> None:
        self._chat.reset()
        self._say("the conversation is empty")

    def _show_stats(self) -> None:
        answers = self._chat.answers
        if not answers:
            raise RequestError("there is no answer yet")
        self._console.print(run_table([answers[-1].record]))
        tokens = sum(answer.record.stats.output_tokens for answer in answers)
        drafted = sum(answer.drafted for answer in answers)
        accepted = f", {drafted} of them accepted draft tokens" if self._chat.has_draft else ""
        plural = "" if len(answers) == 1 else "s"
        self._say(f"{len(answers)} answer{plural}, {tokens} tokens{accepted}")

    def _compare(self) -> None:
        stream = self._stream()
        plain, drafted = self._chat.compare(_printer(stream))
        stream.finish(0, drafted.text)
        self._console.print(comparison_table(plain, drafted))
        if self._chat.has_seen_answers:
            self._say("suffix decoding has seen this answer before: new text has fewer drafts")

    def _stream(self) -> TokenStream:
        return TokenStream(["answer"], raw_terminal=self._raw_terminal)

    def _say(self, text: str, *, dim: bool = False) -> None:
        self._console.print(Text(text, style="dim" if dim else ""), soft_wrap=True)


def _printer(stream: TokenStream) -> Callable[[TokenEvent], None]:
    return lambda event: stream.write(0, event.text, from_draft=event.from_draft)


def answer_line(answer: Answer, has_draft: bool) -> str:
    """Return the statistics of an answer in one line."""
    stats = answer.record.stats
    parts = [
        f"TTFT {milliseconds(stats.ttft_s)}",
        f"{stats.output_tokens_per_s:.1f} tokens/s",
        f"{stats.output_tokens} tokens",
    ]
    if has_draft:
        share = 100 * answer.drafted / max(1, stats.output_tokens)
        parts.append(f"{answer.drafted} accepted from the draft ({share:.0f} %)")
    if answer.record.finish_reason == "abort":
        parts.append("stopped")
    elif answer.record.finish_reason == "length":
        parts.append("ended at the length limit")
    return ", ".join(parts)


def comparison_table(plain: Answer, drafted: Answer) -> Table:
    """Return the times of two answers to one question, and whether their tokens are equal."""
    table = Table(title="the same answer", title_justify="left")
    table.add_column("", style="bold")
    for heading in ("without draft", "with draft"):
        table.add_column(heading, justify="right")
    pair = (plain, drafted)
    stats = [answer.record.stats for answer in pair]
    table.add_row("TTFT", *(milliseconds(s.ttft_s) for s in stats))
    table.add_row("each further token", *(milliseconds(s.tpot_s) for s in stats))
    table.add_row("tokens/s", *(f"{s.output_tokens_per_s:.1f}" for s in stats))
    table.add_row("tokens", *(str(s.output_tokens) for s in stats))
    table.add_row("target passes", *(str(s.steps) for s in stats))
    table.add_row("accepted draft tokens", *(str(answer.drafted) for answer in pair))
    if plain.record.output_ids != drafted.record.output_ids:
        table.add_row("tokens are", "", "not equal")
    return table


def typed_lines() -> Iterator[str]:
    """The lines that a user types, with history and editing where the system has readline.

    Ctrl-D ends them; ctrl-C clears the line, and twice in a row ends them too. A line that ends
    with a backslash continues on the next line.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it
    interrupted = False
    parts: list[str] = []
    while True:
        try:
            line = input(_CONTINUED if parts else _PROMPT)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if interrupted:
                return
            interrupted = True
            parts.clear()
            print("ctrl-C again, or ctrl-D, leaves", file=sys.stderr)
            continue
        interrupted = False
        parts.append(line)
        if line.endswith("\\"):
            parts[-1] = line[:-1]
            continue
        yield "\n".join(parts)
        parts = []


def piped_lines() -> Iterator[str]:
    """The lines of standard input, each a message. Raises RequestError where one is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input line {number} is not UTF-8: byte {error.start} is wrong"
            ) from error
