"""Commands in the documentation work: each fenced command, in order, in one folder a page."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_commands import LEFT, LONG, PAGES, ROOT, blocks, commands, left_by
from page_folder import PageFolder

QUICK = ("README.md", "docs/troubleshooting.md")
# Each command of this page is a separate example.
REFERENCE = ROOT / "docs" / "cli.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words_of(page: Path) -> list[str]:
    """Return the words in commands, and in files that the page shows."""
    commands = [text for language, text in blocks(page) if language in ("sh", "yaml")]
    return [word for text in commands for word in text.split()]


def lines_of(page: Path) -> list[str]:
    return [line for language, text in blocks(page) if language == "sh" for line in commands(text)]


@contextmanager
def folder_for(words: list[str], engine: Path, path: Path) -> Iterator[PageFolder]:
    """Yield a folder with the files that these commands name; stop its server at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path.mkdir()
    folder = PageFolder(path, engine, port)
    folder.prepare(words)
    try:
        yield folder
        folder.stop()
    finally:
        if folder.server is not None:
            folder.server.kill()
            folder.server.wait()


def runs_here(command: str) -> bool:
    if "tensorrt-rtx" in command and importlib.util.find_spec("tensorrt_rtx") is None:
        return False
    return left_by(command) is None


def output_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of an output on a page, where … stands for parts that differ."""
    return re.compile(re.escape(text.strip()).replace("…", ".*"), re.DOTALL)


def try_page(page: Path, folder: PageFolder, left_out: str = "^$") -> None:
    """Run the page's blocks in order; a text block is the output of the commands before it."""
    for language, text in blocks(page):
        if language == "sh":
            for command in commands(text):
                if runs_here(command) and not re.search(left_out, command):
                    folder.run(command)
        elif language == "python":
            folder.python(text)
        elif language == "text":
            assert output_pattern(text).search(folder.output), folder.output


@pytest.mark.parametrize("page", [ROOT / name for name in QUICK], ids=name_of)
def test_quick_commands_of_pages_run(page: Path, example_engine: Path, tmp_path: Path) -> None:
    with folder_for(words_of(page), example_engine, tmp_path / "page") as folder:
        try_page(page, folder, LONG)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in PAGES if page != REFERENCE], ids=name_of)
def test_commands_of_a_page_run(page: Path, example_engine: Path, tmp_path: Path) -> None:
    with folder_for(words_of(page), example_engine, tmp_path / "page") as folder:
        try_page(page, folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", [text for _, text in blocks(REFERENCE)])
def test_examples_of_the_command_line_run(block: str, example_engine: Path, tmp_path: Path) -> None:
    lines = [line for line in commands(block) if runs_here(line)]
    words = [word for line in lines for word in line.split()]
    with folder_for(words, example_engine, tmp_path / "page") as folder:
        folder.alternatives = True
        for line in lines:
            folder.run(line)


def test_the_commands_that_are_not_run_are_counted() -> None:
    found = Counter(left_by(line) for page in PAGES for line in lines_of(page))
    assert [(left, found[left]) for left in LEFT] == [(left, left.count) for left in LEFT]
