"""The code of docs/developers/add-an-endpoint.md serves an endpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.served import TEMPLATE, served, worded

from specbuild.runtime.serve import app, handlers, routes
from specbuild.runtime.serve.openapi import openapi_document
from specbuild.runtime.serve.routes import OPERATIONS, Operation

RECIPE = Path(__file__).parents[4] / "docs/developers/add-an-endpoint.md"


@pytest.fixture(scope="module")
def operation() -> Operation:
    """Return the operation that the code blocks of the recipe define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", RECIPE.read_text(encoding="utf-8"), re.S):
        exec(block, names)
    defined: Operation = names["operation"]
    return defined


def test_the_recipe_serves_its_endpoint(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "OPERATIONS", (*OPERATIONS, operation))
    with served(worded(TEMPLATE)) as (url, _):
        counted = httpx.post(f"{url}/count", json={"prompt": "abc"}, timeout=300)
        wrong = httpx.post(f"{url}/count", json={"prompt": 3}, timeout=300)
        other = httpx.get(f"{url}/count", timeout=300)
    assert counted.status_code == 200 and counted.json() == {"count": 3}
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"
    assert other.status_code == 405 and other.headers["allow"] == "POST"


def test_the_recipe_documents_and_protects_it(operation: Operation) -> None:
    about = openapi_document([operation])["paths"]["/count"]["post"]
    assert about["summary"] == operation.summary and {"key": []} in about["security"]
    assert about["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/CountFields"
    }
    assert routes.needs_key(operation.path)


def test_a_request_without_a_key_reaches_open_operations_only() -> None:
    """The server checks keys for exactly the operations that the table does not mark as open."""
    opened = {o.path for o in OPERATIONS if o.is_open}
    with served(worded(TEMPLATE), keys=("secret",)) as (url, _):
        for operation in OPERATIONS:
            path = re.sub(r"\{\w+(:path)?\}", "index.html", operation.path)
            answer = httpx.request(operation.method.upper(), url + path, timeout=300)
            assert (answer.status_code != 401) == (operation.path in opened), path


def test_every_handler_is_in_the_table_of_the_recipe() -> None:
    text = RECIPE.read_text(encoding="utf-8")
    for name in ("OPERATIONS", "Operation", "object_schema", "REFUSED", "IGNORED", "in_thread"):
        assert f"`{name}" in text or f"{name}(" in text or f".{name}" in text
    modules = {routes.__name__, handlers.__name__}
    assert {o.handler.__module__ for o in OPERATIONS} == modules
