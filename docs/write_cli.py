"""Write the options of every command into docs/cli.md, from the command line itself.

.venv/bin/python docs/write_cli.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from rich.text import Text

from specbuild.cli.main import command_line

PAGE = Path(__file__).with_name("cli.md")
MARK = "<!-- The rest is generated from the command line: `make docs` writes it. -->\n"
# Every command takes it; the head of the page says so.
EVERYWHERE = ("--debug", "--help")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, in the order of ``specbuild --help``."""
    for name, command in typer.main.get_command(command_line()).commands.items():  # type: ignore[attr-defined]
        for sub_name, sub in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub_name}".strip(), sub


def page(text: str) -> str:
    """Return the page ``text`` with everything after its mark replaced."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name} has no line {MARK.strip()!r}")
    return head + mark + "".join(_section(name, command) for name, command in commands())


def _section(name: str, command: Any) -> str:
    about, _, examples = command.help.partition("\n\x08\n")
    plain = Text.from_markup(_as_code(about)).plain
    lines = [line.strip() for line in examples.splitlines()]
    shell = "\n".join(line for line in lines if line and line != "Examples:")
    tables = "".join(_table(title, params) for title, params in _panels(command).items())
    return f"\n## specbuild {name}\n\n{plain.strip()}\n\n```sh\n{shell}\n```\n{tables}"


def _as_code(markup: str) -> str:
    return markup.replace("[b]", "`").replace("[/b]", "`")


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if not getattr(param, "hidden", False) and param.opts[0] not in EVERYWHERE:
            panels.setdefault(getattr(param, "rich_help_panel", None) or "", []).append(param)
    return panels


def _table(title: str, params: list[Any]) -> str:
    rows = "".join(f"| {_name(p)} | {_escaped(p.help or '')} | {_default(p)} |\n" for p in params)
    heading = f"\n**{title}**\n" if title else ""
    return f"{heading}\n| | meaning | default |\n|---|---|---|\n{rows}"


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar}`"
    metavar = "" if param.is_flag or not param.metavar else f" {param.metavar}"
    names = [f"`{option}{_escaped(metavar)}`" for option in param.opts]
    return ", ".join(names + [f"`{option}`" for option in param.secondary_opts])


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    return "" if param.default in (None, False) else f"`{param.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
