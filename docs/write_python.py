"""Write docs/python-reference.md from the docstrings and signatures of the Python API.

.venv/bin/python docs/write_python.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from specbuild.runtime import errors
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.records import RunRecord, RunStats
from specbuild.runtime.request import FinishEvent, Prompt, TokenEvent
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings
from specbuild.runtime.text.engine_tokenizer import EngineTokenizer

PAGE = Path(__file__).with_name("python-reference.md")
CLASSES = (
    Engine,
    RuntimeSettings,
    PrefillSchedule,
    DraftSetting,
    EngineTokenizer,
    Prompt,
    GenerateParams,
    SamplingParams,
    Guide,
    TokenEvent,
    FinishEvent,
    RunRecord,
    RunStats,
)
# The others are values: their fields are all that a user needs.
WITH_METHODS = (Engine, EngineTokenizer, Guide)
HEAD = """# Python reference

Every public class of the library, from its docstrings. [Python](python.md) shows how to use them.
`DraftSetting`, `Engine`, `GenerateParams`, `Guide`, `PrefillSchedule`, `Prompt`,
`RuntimeSettings` and `errors` are imported from `specbuild`.
In the examples `engine` is a loaded engine with a chat template.

<!-- This page is generated from the library: `make docs` writes it. -->
"""


def page() -> str:
    """Return the text of the page."""
    classes = "".join(map(class_section, CLASSES))
    return f"{HEAD}{classes}{error_section()}"


def class_section(kind: type) -> str:
    """Return the section of a class: its docstring, fields or constructor, and methods."""
    parts = [f"\n## {kind.__name__}\n", prose(inspect.getdoc(kind) or "")]
    if dataclasses.is_dataclass(kind):
        parts.append(field_table(kind))
    if kind in WITH_METHODS:
        members = public_members(kind)
        parts += [member_section(kind.__name__, name, member) for name, member in members]
    return "\n".join(parts)


def public_members(kind: type) -> Iterator[tuple[str, object]]:
    """Yield methods and properties with docstrings, in the order of the source."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            kinds = (property, classmethod, staticmethod, FunctionType)
            is_public = not name.startswith("_") and isinstance(member, kinds)
            is_overridden = base is not defining_class(kind, name)
            if is_public and not is_overridden and inspect.getdoc(member):
                yield name, member


def defining_class(kind: type, name: str) -> type:
    """Return the class whose member of this name ``kind`` has."""
    return next(base for base in kind.__mro__ if name in vars(base))


def member_section(owner: str, name: str, member: object) -> str:
    """Return a heading with the signature, and the docstring."""
    text = prose(inspect.getdoc(member) or "")
    if isinstance(member, property):
        return f"### {owner}.{name}\n\n{text}"
    function = getattr(member, "__func__", member)
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    call = f"{prefix}{owner}.{name}{signature(function)}"
    return f"### {owner}.{name}()\n\n`{call}`\n\n{text}"


def signature(function: object) -> str:
    """Return the parameters of a function without self, with defaults, types left out."""
    result = inspect.signature(function)  # type: ignore[arg-type]
    without_types = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in result.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(inspect.Signature(without_types))


def field_table(kind: type) -> str:
    """Return the fields of a dataclass with types and defaults."""
    rows = [
        f"| `{entry.name}` | `{type_text(entry.type)}` | {default_text(entry)} |"
        for entry in dataclasses.fields(kind)
    ]
    return "\n".join(["| field | type | default |", "|---|---|---|", *rows, ""])


def type_text(hint: object) -> str:
    """Return a type as the source writes it, the first part of ``Annotated`` alone."""
    text = re.sub(r"\s+", " ", str(hint))
    annotated = re.match(r"Annotated\[(.*?), ?Parameter\(", text)
    return (annotated[1] if annotated else text).strip().replace("|", "\\|")


def default_text(entry: dataclasses.Field[object]) -> str:
    """Return a field's default; empty where it must be given."""
    if entry.default is not dataclasses.MISSING:
        return f"`{entry.default!r}`"
    return "" if entry.default_factory is dataclasses.MISSING else "its defaults"


def prose(text: str) -> str:
    """Return a docstring as Markdown: code in single backticks, examples in blocks."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    lines: list[str] = []
    in_example = False
    for line in text.splitlines():
        begins = line.startswith(">>>")
        if begins and not in_example:
            lines.append("```pycon")
            in_example = True
        elif in_example and not line.strip():
            lines.append("```")
            in_example = False
        lines.append(line)
    return "\n".join([*lines, "```"] if in_example else lines) + "\n"


def error_section() -> str:
    """Return a table of the exceptions."""
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    kinds.sort(key=lambda kind: len(kind.__mro__))
    rows = [
        f"| `{kind.__name__}` | {prose(inspect.getdoc(kind) or '').strip()} |" for kind in kinds
    ]
    return "\n".join(["\n## errors\n", "| exception | meaning |", "|---|---|", *rows, ""])


def doc_of(member: object) -> str:
    """Return a docstring without its indentation."""
    return inspect.getdoc(member) or ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
