"""The documents' Python runs as it stands, but for the engine's place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{document.name}, block {i}")
    for document in DOCUMENTS
    for i, block in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")))
    if "Engine.load" in block
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(
    example: str, tiny_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert '"out/engine"' in example
    exec(example.replace("out/engine", str(tiny_engine)), {})
    assert capsys.readouterr().out.strip()


def test_the_read_me_shows_one() -> None:
    assert "from specbuild import Engine" in (ROOT / "README.md").read_text(encoding="utf-8")
