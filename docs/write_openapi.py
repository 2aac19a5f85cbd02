"""Write the API of `specbuild serve` into docs/openapi.json, from its table of routes.

.venv/bin/python docs/write_openapi.py
"""

from __future__ import annotations

import json
from pathlib import Path

from specbuild.runtime.serve.openapi import openapi_document
from specbuild.runtime.serve.routes import OPERATIONS

FILE = Path(__file__).with_name("openapi.json")


def document_text() -> str:
    """What the file has to hold."""
    return json.dumps(openapi_document(OPERATIONS), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(document_text(), encoding="utf-8")
