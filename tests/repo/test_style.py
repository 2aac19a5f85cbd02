"""House rules that no linter knows; `make lint` runs those."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("builder", "cli", "plugins_cuda", "runtime")
MOST_LINES = 400
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~])/(?:home|root|tmp|usr|work|opt|mnt|Users)/")


def files_of(*folders: str, suffixes: tuple[str, ...] = (".py", ".cu", ".cuh")) -> list[Path]:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return sorted(file for file in files if file.suffix in suffixes)


def python_of(*folders: str) -> list[Path]:
    return files_of(*folders, suffixes=(".py",))


def ours() -> list[Path]:
    return files_of(*SOURCES, "tests", "examples", "benchmarks")


def test_files_are_short() -> None:
    long = {}
    for file in ours():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            long[str(file.relative_to(ROOT))] = lines
    assert not long


def test_files_are_named_for_what_they_hold() -> None:
    assert not [file for file in ours() if FORBIDDEN_NAMES & {file.stem, *file.parts}]


def test_environment_variables_are_read_in_the_command_line_only() -> None:
    wrong = []
    for file in python_of("runtime", "plugins_cuda", "builder"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = {"environ", "getenv", "environb", "putenv"}
            if isinstance(node, ast.Attribute) and node.attr in names:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_sources_hold_no_absolute_path() -> None:
    wrong = []
    for file in files_of(*SOURCES, "examples", "benchmarks"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if ABSOLUTE_PATH.search(line):
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong


def test_sources_hold_no_unfinished_work() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert not [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files_of(*SOURCES)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]


def test_modules_say_what_they_are() -> None:
    assert not [
        str(file.relative_to(ROOT))
        for file in python_of(*SOURCES)
        if file.name != "__init__.py"
        and ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) is None
    ]


def test_static_shared_variables_have_no_alignment_of_their_own() -> None:
    """NVRTC places such ones in another order now and then: equal builds would differ."""
    aligned = re.compile(r"__align__\(\d+\) __shared__|(?<!extern )__shared__ (__align__|alignas)")
    assert not [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files_of("plugins_cuda", suffixes=(".cu", ".cuh"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if aligned.search(line)
    ]
