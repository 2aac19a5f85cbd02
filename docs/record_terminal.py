"""Makes docs/chat.svg: a conversation with SmolLM2 in a terminal, as it was typed and answered.

In a folder with a link SmolLM2.gguf to the model:
python CHECKOUT/docs/record_terminal.py --line "What is a prime number?" \\
  -- specbuild chat SmolLM2.gguf

The command runs in a pseudo-terminal. Each line is typed when the program shows its prompt. The
picture shows every character at the time at which the program wrote it; nothing is cut or sped up.
It plays once, and viewers that do not animate show its end.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("chat.svg")
PROMPT = "> "
KEY_S = 0.035
READ_S = 0.7  # after an answer, before the next line is typed
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
# The classes of the style sheet for the SGR parameters that specbuild's output contains.
STYLES = {"1": "bold", "2": "dim", "32": "green", "33": "yellow", "36": "draft"}
CHARACTER, LINE, SIZE, EDGE, BAR = 8.4, 20, 14, 18, 34
_FONT = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
_SHEET = f"""<style>
text {{ font: {SIZE}px {_FONT}; fill: #1c1e21; white-space: pre }}
.paper {{ fill: #fbfaf7; stroke: #d8d4ca }} .dot {{ fill: #c9c4b8 }}
.title, .dim {{ fill: #5d6168 }} .bold {{ font-weight: 700 }} .typed {{ font-weight: 600 }}
.green {{ fill: #3d6a12 }} .yellow {{ fill: #8a5a00 }} .draft {{ fill: #0f766e }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e7e6e2 }} .paper {{ fill: #15171a; stroke: #3a3f46 }} .dot {{ fill: #4a5058 }}
  .title, .dim {{ fill: #a0a5ad }}
  .green {{ fill: #93c75c }} .yellow {{ fill: #e0b34a }} .draft {{ fill: #3fbfb0 }}
}}
@keyframes show {{ from {{ visibility: hidden }} to {{ visibility: visible }} }}
@media (prefers-reduced-motion: no-preference) {{ .late {{ animation: show 1ms both }} }}
</style>"""


@dataclass(frozen=True)
class Cell:
    """A character of the screen, its style, and when it was written."""

    text: str
    style: str
    at_s: float


@dataclass
class Screen:
    """The lines that a program wrote: enough of a terminal for text, colours and progress bars."""

    columns: int
    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    style: str = ""
    typing: bool = False
    row: int = 0
    column: int = 0

    def write(self, text: str, at_s: float) -> None:
        """Show what a program wrote at a time."""
        place = 0
        for code in ESCAPE.finditer(text):
            self._characters(text[place : code.start()], at_s)
            self._obey(code[1], code[2])
            place = code.end()
        self._characters(text[place:], at_s)

    def _characters(self, text: str, at_s: float) -> None:
        for character in text:
            if character == "\n":
                self._next_row()
            elif character == "\r":
                self.column = 0
            elif character == "\b":
                self.column = max(0, self.column - 1)
            elif character >= " ":
                if self.column == self.columns:
                    self._next_row()
                line = self.lines[self.row]
                line += [Cell(" ", "", at_s)] * (self.column + 1 - len(line))
                style = "typed" if self.typing else self.style
                line[self.column] = Cell(character, style, at_s)
                self.column += 1

    def _next_row(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append([])

    def _obey(self, parameters: str, command: str) -> None:
        if command == "m":
            named = [STYLES[one] for one in parameters.split(";") if one in STYLES]
            self.style = " ".join(named)
        elif command == "K":
            del self.lines[self.row][0 if parameters == "2" else self.column :]
        elif command == "A":
            self.row = max(0, self.row - int(parameters or "1"))


def runs(line: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """The parts of a line that share a style and a moment, each with its first column."""
    first = 0
    for column in range(1, len(line) + 1):
        before = line[column - 1]
        if column == len(line) or (line[column].style, line[column].at_s) != (
            before.style, before.at_s,
        ):  # fmt: skip
            yield first, list(line[first:column])
            first = column


def picture(screen: Screen, title: str) -> str:
    """The SVG of a screen."""
    lines = list(screen.lines)
    while lines and not any(cell.text.strip() for cell in lines[-1]):
        lines.pop()
    width, height = 2 * EDGE + CHARACTER * screen.columns, BAR + LINE * len(lines) + EDGE
    inner = f'width="{width - 1:g}" height="{height - 1:g}"'
    middle = f'x="{width / 2:g}" y="22" text-anchor="middle"'
    parts = [
        f'<rect class="paper" x="0.5" y="0.5" {inner} rx="9"/>',
        *(f'<circle class="dot" cx="{EDGE + 18 * dot}" cy="17" r="5.5"/>' for dot in range(3)),
        f'<text class="title" {middle}>{escape(title)}</text>',
    ]
    for number, line in enumerate(lines):
        y = BAR + LINE * number + SIZE
        for column, cells in runs(line):
            text = "".join(cell.text for cell in cells)
            if not text.strip():
                continue
            # The length keeps columns aligned in any monospaced font.
            place = f'x="{EDGE + CHARACTER * column:.1f}" y="{y}"'
            length = f'textLength="{CHARACTER * len(text):.1f}"'
            kind = f"late {cells[0].style}".strip()
            delay = f'style="animation-delay:{cells[0].at_s:.2f}s"'
            parts.append(f'<text class="{kind}" {place} {length} {delay}>{escape(text)}</text>')
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _SHEET, *parts, "</svg>", ""])


def recorded(command: Sequence[str], typed: Sequence[str], columns: int) -> Screen:
    """The screen after a command has answered each line and ended.

    Raises RuntimeError where the command fails.
    """
    screen = Screen(columns)
    screen.typing = True
    screen.write(f"$ {shlex.join(command)}\r\n", 0.0)
    screen.typing = False
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns)}
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    started = time.monotonic()
    waiting = list(typed)
    for output in _outputs(terminal):
        screen.write(output.decode("utf-8", "replace"), time.monotonic() - started)
        if "".join(cell.text for cell in screen.lines[screen.row]) == PROMPT:
            if not waiting:
                os.write(terminal, b"\x04")
                continue
            time.sleep(READ_S)
            screen.typing = True
            _type(terminal, waiting.pop(0), screen, started)
            screen.typing = False
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the command ended with {os.waitstatus_to_exitcode(status)}")
    return screen


def _outputs(terminal: int) -> Iterator[bytes]:
    """What the program writes, joined until it pauses for a few milliseconds."""
    ended = False
    while not ended:
        output = b""
        while not output or select.select([terminal], [], [], 0.004)[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # Linux reports the end of the program as an error of the terminal
                part = b""
            output += part
            if ended := not part:
                break
        if output:
            yield output


def _type(terminal: int, line: str, screen: Screen, started: float) -> None:
    """Types a line key by key, and shows what the line editor makes of each key."""
    for key in line:
        os.write(terminal, key.encode())
        time.sleep(KEY_S)
        if select.select([terminal], [], [], 0.2)[0]:
            echoed = os.read(terminal, 1 << 12)
            screen.write(echoed.decode("utf-8", "replace"), time.monotonic() - started)
    os.write(terminal, b"\r")


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--line", action="append", default=[], help="typed at the next prompt")
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--columns", type=int, default=88)
    parser.add_argument("--title", default="specbuild")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    screen = recorded(args.command, args.line, args.columns)
    args.output.write_text(picture(screen, args.title), encoding="utf-8")


if __name__ == "__main__":
    main()
