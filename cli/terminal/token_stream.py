"""Writes generated text to standard output as a stream, with draft tokens in another colour."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.style import Style

from specbuild.cli.terminal.visible_text import visible

DRAFT_STYLE = Style(color="cyan")
HEADING_STYLE = Style(bold=True)


class TokenStream:
    """Writes the tokens of several requests, one request after the other in input order.

    The first unfinished request is shown live; the output of others waits for its turn. On a
    terminal, control characters are escaped unless it is ``raw_terminal``.
    """

    def __init__(
        self, titles: list[str], file: TextIO | None = None, *, raw_terminal: bool = False
    ) -> None:
        self._file = sys.stdout if file is None else file
        console = Console(file=self._file)
        self._visible = console.is_terminal and not raw_terminal
        self._coloured = console.color_system is not None and not console.no_color
        self._titles = titles
        self._waiting: list[list[tuple[str, bool]]] = [[] for _ in titles]
        self._written = [""] * len(titles)
        self._finished = [False] * len(titles)
        self._current = 0
        self._show_title()

    def write(self, request: int, text: str, *, from_draft: bool) -> None:
        """Write the text of one token of a request."""
        self._written[request] += text
        if request == self._current:
            self._print(text, DRAFT_STYLE if from_draft else None)
            self._file.flush()
        else:
            self._waiting[request].append((text, from_draft))

    def finish(self, request: int, text: str | None) -> None:
        """End a request; ``text`` is its complete text, so that nothing held back is lost."""
        already = self._written[request]
        if text is not None and text.startswith(already) and len(text) > len(already):
            self.write(request, text[len(already) :], from_draft=False)
        self._finished[request] = True
        while self._current < len(self._titles) and self._finished[self._current]:
            self._print("\n", None)
            self._current += 1
            self._show_title()
            self._release()
        self._file.flush()

    def _release(self) -> None:
        if self._current < len(self._titles):
            for text, from_draft in self._waiting[self._current]:
                self._print(text, DRAFT_STYLE if from_draft else None)
            self._waiting[self._current].clear()

    def _show_title(self) -> None:
        if len(self._titles) > 1 and self._current < len(self._titles):
            self._print(f"── {visible(self._titles[self._current], keep='')} ──", HEADING_STYLE)
            self._print("\n", None)

    def _print(self, text: str, style: Style | None) -> None:
        if self._visible:
            text = visible(text)
        if style is not None and self._coloured and text:
            text = style.render(text)
        self._file.write(text)
