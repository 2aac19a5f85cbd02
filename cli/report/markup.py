"""HTML of tables and sections; all displayed text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specbuild.cli.terminal.visible_text import visible

# Longer tables are folded.
_FOLDED_ROWS = 14


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its title, and HTML."""

    anchor: str
    title: str
    body: str


def escaped(text: object) -> str:
    """Return escaped text, also for attributes; control characters become escapes."""
    return html.escape(visible(str(text)))


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_of(kind)}>{escaped(text)}</p>\n"


def figure(drawn: str, caption: str, *, source: str) -> str:
    """Return a picture or table that comes from ``source``, a record or file of the engine."""
    caption_html = f"{escaped(caption)} " if caption else ""
    return (
        f'<figure data-source="{escaped(source)}">\n{drawn}'
        f"<figcaption>{caption_html}<span>{escaped(source)}</span></figcaption>\n</figure>\n"
    )


def converted(content: Any) -> str:
    """Return a terminal table, or a group of tables and lines, as HTML."""
    if isinstance(content, Group):
        return "".join(map(converted, content.renderables))
    if isinstance(content, Table):
        return _converted_table(content)
    return paragraph(_plain(content))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, folded if it is long. Without headings it has names and values."""
    cells = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    head = "".join(f"<th>{escaped(heading)}</th>" for heading in headings)
    above = f"<thead><tr>{head}</tr></thead>" if headings else ""
    kind = "" if headings else ' class="facts"'
    folded = len(cells) > _FOLDED_ROWS
    caption = f"<caption>{escaped(title)}</caption>" if title and not folded else ""
    body = "\n".join(cells)
    drawn = (
        f'<div class="wide"><table{kind}>{caption}{above}<tbody>\n{body}\n</tbody></table></div>\n'
    )
    if not folded:
        return drawn
    name = title or headings[0]
    return f"<details><summary>{escaped(name)}: {len(cells)} rows</summary>\n{drawn}</details>\n"


def _converted_table(content: Table) -> str:
    headings = [_plain(column.header) for column in content.columns] if content.show_header else []
    columns = [[_plain(cell) for cell in column.cells] for column in content.columns]
    title = "" if content.title is None else _plain(content.title)
    return table(title, headings, zip(*columns, strict=True))


def _plain(content: Any) -> str:
    return content.plain if isinstance(content, Text) else str(content)


def _cell(text: str) -> str:
    kind = "number" if text[:1] in tuple("0123456789~–−-") and len(text) < 24 else ""
    return f"<td{_of(kind)}>{escaped(text)}</td>"


def _of(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
