"""HTML of tables and sections; everything that is shown is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specbuild.cli.terminal.visible_text import visible

# Longer tables open on a click.
_FOLDED_ROWS = 14


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its title, and HTML."""

    anchor: str
    title: str
    body: str


def escaped(text: object) -> str:
    """Text as HTML shows it, in attributes too; control characters as escapes."""
    return html.escape(visible(str(text)))


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_of(kind)}>{escaped(text)}</p>\n"


def figure(drawn: str, caption: str, *, source: str) -> str:
    """A picture or table that comes from ``source``, the record or file of the engine."""
    said = f"{escaped(caption)} " if caption else ""
    return (
        f'<figure data-source="{escaped(source)}">\n{drawn}'
        f"<figcaption>{said}<span>{escaped(source)}</span></figcaption>\n</figure>\n"
    )


def converted(shown: Any) -> str:
    """A table that the terminal shows, or a group of such and of lines, as HTML."""
    if isinstance(shown, Group):
        return "".join(map(converted, shown.renderables))
    if isinstance(shown, Table):
        return _converted_table(shown)
    return paragraph(_plain(shown))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, folded where it is long. Without headings it is names and values."""
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


def _converted_table(shown: Table) -> str:
    headings = [_plain(column.header) for column in shown.columns] if shown.show_header else []
    columns = [[_plain(cell) for cell in column.cells] for column in shown.columns]
    title = "" if shown.title is None else _plain(shown.title)
    return table(title, headings, zip(*columns, strict=True))


def _plain(shown: Any) -> str:
    return shown.plain if isinstance(shown, Text) else str(shown)


def _cell(text: str) -> str:
    kind = "number" if text[:1] in tuple("0123456789~–−-") and len(text) < 24 else ""
    return f"<td{_of(kind)}>{escaped(text)}</td>"


def _of(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
