"""docs/record_terminal.py: the picture shows a program's output with its timing."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

DOCS = Path(__file__).parents[2] / "docs"
NAME = "{http://www.w3.org/2000/svg}"
# A bar that is drawn twice, a prompt, and an answer in two parts, the second one of the draft.
PROGRAM = """
import sys, time
print("load 10 %", flush=True)
print("\\x1b[1A\\x1b[2Kload 100 %", flush=True)
try:
    while True:
        line = input("> ")
        print(line.upper(), end=" ", flush=True)
        time.sleep(0.3)
        print("\\x1b[36mdrafted & <done>\\x1b[0m", flush=True)
except EOFError:
    print("bye")
"""


@pytest.fixture
def script() -> ModuleType:
    return load_script(DOCS / "record_terminal.py")


def texts(svg: str) -> list[tuple[float, str, str, float]]:
    """Yield height, text, classes and delay of every text element after the title."""
    results = []
    for element in ET.fromstring(svg).iter(f"{NAME}text"):
        delay = re.search(r"delay:([\d.]+)s", element.get("style", ""))
        if delay:
            kinds = element.get("class", "")
            results.append((float(element.get("y", 0)), element.text or "", kinds, float(delay[1])))
    return results


def lines(svg: str) -> list[str]:
    """Return the picture's lines without spaces: elements of spaces are not drawn."""
    rows: dict[float, str] = {}
    for height, text, *_ in texts(svg):
        rows[height] = rows.get(height, "") + text.replace(" ", "")
    return [rows[height] for height in sorted(rows)]


def test_a_recording_has_the_screen_and_its_times(script: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_text(PROGRAM)
    screen = script.recorded([sys.executable, str(program)], ["one two"], 300)
    svg = script.picture(screen, "a <title>")
    on_screen = lines(svg)
    assert on_screen[0].startswith("$") and on_screen[-1].endswith("bye")
    assert "load100%" in on_screen and "load10%" not in on_screen
    assert ">onetwo" in on_screen
    assert any(line.startswith("ONETWOdrafted&<done>") for line in on_screen)
    (drafted,) = [text for text in texts(svg) if "drafted" in text[1]]
    (plain,) = [text for text in texts(svg) if text[1].startswith("ONE")]
    assert "draft" in drafted[2].split() and "draft" not in plain[2].split()
    assert 0.25 < drafted[3] - plain[3] < 5
    typed = [text for text in texts(svg) if "typed" in text[2] and text[3] > 0]
    assert "".join(text[1] for text in typed) == "onetwo"


def test_long_lines_wrap_at_the_edge_of_the_screen(script: ModuleType) -> None:
    screen = script.Screen(10)
    screen.write("abcdefghijklm\r\nxyz\b!", 1.0)
    rows = ["".join(cell.text for cell in line) for line in screen.lines]
    assert rows == ["abcdefghij", "klm", "xy!"]


def test_a_failed_command_creates_no_picture(script: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        script.recorded([sys.executable, "-c", "raise SystemExit(3)"], [], 40)
