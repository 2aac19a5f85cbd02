"""The OpenAPI file, and schemathesis: every answer matches the file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from serve.served import NAME, TEMPLATE, served, worded

from specbuild.runtime.serve.openapi import openapi_document
from specbuild.runtime.serve.routes import OPERATIONS

# A valid body may still be rejected: a context that is too long, or a template's own rules.
NOT_HELD = "positive_data_acceptance"
EXAMPLES = settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def document_of_this_server() -> dict[str, Any]:
    """Return the file with the name of this server's model as the only one.

    Omit ``timeout``: a timeout is answered with 504, which schemathesis counts as a server error.
    """
    document = openapi_document(OPERATIONS)
    for schema in document["components"]["schemas"].values():
        schema.get("properties", {}).pop("timeout", None)
        model = schema.get("properties", {}).get("model", {})
        if "anyOf" in model:
            schema["properties"]["model"] = {"enum": [NAME, None]}
        elif model:
            schema["properties"]["model"] = {"enum": [NAME]}
    return document


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(worded(TEMPLATE)) as (url, _):
        yield url


def test_the_server_returns_its_openapi_file(url: str) -> None:
    assert httpx.get(f"{url}/openapi.json", timeout=300).json() == openapi_document(OPERATIONS)


def test_every_route_is_in_the_file() -> None:
    with served(worded(TEMPLATE), page=False) as (_, app):
        paths = {
            route.path.replace(":path", "") for route in app.asgi.routes if route.path[0] == "/"
        }
    assert paths - {"/openapi.json", "/docs"} == set(openapi_document(OPERATIONS)["paths"])


def test_answers_to_bodies_of_the_file_match_the_file(url: str) -> None:
    schema = schemathesis.openapi.from_dict(document_of_this_server())
    schema.config.update(base_url=url)
    answered = set()
    for path in [path for path, about in schema.raw_schema["paths"].items() if "post" in about]:
        operation = schema[path]["POST"]

        @EXAMPLES
        @given(case=operation.as_strategy())
        def try_it(case: schemathesis.Case) -> None:
            answer = case.call_and_validate(excluded_checks=[checks.positive_data_acceptance])
            answered.add(answer.status_code)

        try_it()
    assert 200 in answered and not any(status >= 500 for status in answered)


@pytest.mark.slow
def test_schemathesis_finds_nothing(url: str, tmp_path: Path) -> None:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document_of_this_server()))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", url]
    options = ["--max-examples", "30", "--exclude-checks", NOT_HELD, "--no-color"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "Stateful" in done.stdout
