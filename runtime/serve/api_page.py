"""The OpenAPI document as one web page, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{background:#8882;padding:0 .2em}summary{cursor:pointer;margin:.4em 0}"
    "td,th{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}"
)


def api_document_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document: its operations, with the fields of their bodies."""
    schemas = document["components"]["schemas"]
    operations = "".join(
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info['description'])} "
        f'<a href="openapi.json">openapi.json</a></p>{operations}</html>'
    )


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> str:
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    body = operation.get("requestBody")
    if body is None:
        return f"<p>{head}</p>"
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[reference.rpartition("/")[2]]
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'required' if name in schema.get('required', ()) else ''}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<details><summary>{head}</summary><table>{rows}</table></details>"


def _type(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "anyOf" in field:
        return " or ".join(_type(variant) for variant in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    name = field.get("type", "any")
    if name == "array":
        return f"list of {_type(field.get('items', {}))}"
    return " or ".join(name) if isinstance(name, list) else str(name)
