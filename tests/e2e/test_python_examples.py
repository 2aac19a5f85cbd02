"""Python examples run: code blocks of README and docs, and examples in docstrings of the API."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from specbuild import Engine, GenerateParams, Prompt
from specbuild.runtime import engine_base, generate_params, request
from specbuild.runtime.text import engine_tokenizer

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{document.name}, block {i}")
    for document in DOCUMENTS
    for i, block in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")))
    if "Engine.load" in block
]
MODULES = (engine_base, engine_tokenizer, generate_params, request)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_code_block_runs(
    example: str, tiny_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the path of the engine is replaced."""
    assert '"out/engine"' in example
    exec(example.replace("out/engine", str(tiny_engine)), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_has_a_python_example() -> None:
    assert "from specbuild import Engine" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Engine:
    """The engine that examples use: it has a draft and a chat template."""
    return Engine.load(tiny_engine)


def test_examples_of_docstrings(engine: Engine) -> None:
    names = {"engine": engine, "GenerateParams": GenerateParams, "Prompt": Prompt}
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    examples = 0
    for module in MODULES:
        for test in finder.find(module, globs=dict(names)):
            examples += len(test.examples)
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert examples >= 12
