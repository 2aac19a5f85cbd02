"""Write the table of docs/request-fields.md: what the server does with each request field.

.venv/bin/python docs/write_request_fields.py

Implemented fields are those of the bodies in the table of routes. Refused and ignored ones, with
the reason, are in runtime/serve/request_fields.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from generated_tables import markdown_table, replace_table

from specbuild.runtime.serve.request_fields import IGNORED, REFUSED, RequestFields, field_states
from specbuild.runtime.serve.routes import OPERATIONS

PAGE = Path(__file__).with_name("request-fields.md")
BODIES: dict[str, type[RequestFields]] = {
    f"`{operation.path}`": operation.body for operation in OPERATIONS if operation.body is not None
}


def note_of(name: str) -> str:
    """Return why a field is ignored or refused, and its accepted neutral values."""
    notes = [f"ignored: {field.reason}" for field in IGNORED if field.name == name]
    for field in REFUSED:
        if field.name == name:
            neutral = dict.fromkeys(json.dumps(value) for value in field.neutral)
            accepted = f"; accepted: {', '.join(f'`{text}`' for text in neutral)}"
            notes.append(f"refused: {field.instead}{accepted if neutral else ''}")
    return ". ".join(notes)


def table() -> str:
    """Return the table as Markdown, in alphabetical order of the fields."""
    by_route = [field_states(body) for body in BODIES.values()]
    rows = [
        (f"`{name}`", *(state.get(name, "") for state in by_route), note_of(name))
        for name in sorted(set().union(*by_route))
    ]
    return markdown_table(("field", *BODIES, ""), rows)


def page(text: str) -> str:
    """Return the page with the table replaced."""
    return replace_table(text, "request fields", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
