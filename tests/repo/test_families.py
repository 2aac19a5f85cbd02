"""What belongs to one model family stands in its folder, and nowhere else in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from specbuild.builder.families.registry import DRAFTS, TARGETS

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "builder" / "families"
NAMES = {
    *(name for family in TARGETS.values() for pair in family.model_types.items() for name in pair),
    *(name for family in DRAFTS.values() for name in family.architectures),
}
# A draft that is one of another family with something more.
BUILT_ON = {"p_eagle": "eagle3"}
# It names a norm's rounding there, not a model.
ROUNDINGS = {Path("builder/backends/cuda/fusions") / f"{name}.py" for name in
             ("matching", "moe", "qkv")}  # fmt: skip
# They name kinds of vocabularies there.
VOCABULARIES = {Path("builder/checkpoint/gguf") / f"{name}.py" for name in
                ("pre_tokenizers", "tokenizer")}  # fmt: skip


def literals(file: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every string that is no docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        said = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if said and id(node) not in documentation:
            yield node.lineno, node.value


def test_no_model_type_is_named_outside_the_families() -> None:
    named = re.compile(rf"\b({'|'.join(map(re.escape, sorted(NAMES)))})\b")
    wrong = []
    for file in sorted(
        f for capacity in ("builder", "cli", "runtime") for f in (ROOT / capacity).rglob("*.py")
    ):
        place = file.relative_to(ROOT)
        if file.is_relative_to(FAMILIES) or place in ROUNDINGS | VOCABULARIES:
            continue
        wrong += [
            f"{place}:{line}: {text!r}" for line, text in literals(file) if named.search(text)
        ]
    assert not wrong


def test_a_family_imports_no_other() -> None:
    folders = {file.parent.name for file in FAMILIES.glob("*/family.py")}
    assert folders == {*TARGETS, *DRAFTS}
    wrong = []
    for folder in folders:
        for file in sorted((FAMILIES / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            found = set(re.findall(r"specbuild\.builder\.families\.(\w+)", text))
            others = folders - {folder, BUILT_ON.get(folder)}
            wrong += [f"{file.relative_to(ROOT)}: {name}" for name in found & others]
    assert not wrong


def test_others_import_families_through_the_registry() -> None:
    """What drafts and synthetic models of one kind are made by may name its folder."""
    allowed = {
        "builder/synth": {"eagle3"},
        "builder/training": {"dflash", "eagle3"},
        "builder/verify": {"dflash", "eagle3", "mtp"},
    }
    folders = {*TARGETS, *DRAFTS}
    wrong = []
    for file in sorted(
        f for capacity in ("builder", "cli") for f in (ROOT / capacity).rglob("*.py")
    ):
        if file.is_relative_to(FAMILIES):
            continue
        place = file.relative_to(ROOT)
        found = set(
            re.findall(r"specbuild\.builder\.families\.(\w+)\.", file.read_text(encoding="utf-8"))
        )
        may = allowed.get("/".join(place.parts[:2]), set())
        wrong += [f"{place}: {name}" for name in (found & folders) - may]
    assert not wrong
