"""Markdown tables that scripts of this folder write into pages between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table as Markdown, one line a row."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_table(text: str, subject: str, table: str) -> str:
    """Return the page ``text`` with ``table`` between the comments that name ``subject``.

    Raises ValueError if either comment is not in the page exactly once.
    """
    begin = f"<!-- The table of {subject} is generated: `make docs` writes it. -->\n"
    end = f"<!-- End of the table of {subject}. -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"
