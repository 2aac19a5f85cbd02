"""The examples in docstrings of the Python API run, with the documented results."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from specbuild import Engine, GenerateParams, Prompt
from specbuild.runtime import engine_base, generate_params, request
from specbuild.runtime.text import engine_tokenizer

MODULES = (engine_base, engine_tokenizer, generate_params, request)


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
