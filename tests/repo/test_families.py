"""Code of one model family is in its package only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from specbuild.builder.families.registry import DRAFTS, TARGETS
from specbuild.runtime.draft.registry import HOST_KINDS
from specbuild.runtime.engine_dir.drafters.registry import RECORDS
from specbuild.runtime.engine_dir.strict_json import field_types

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "builder" / "families"
NAMES = {
    *(name for family in TARGETS.values() for pair in family.model_types.items() for name in pair),
    *(name for family in DRAFTS.values() for name in family.architectures),
}
# Drafts that extend the draft, or read the layers, of another family.
BUILT_ON = {"p_eagle": "eagle3", "gemma4_assistant": "gemma4"}
# There the name means the rounding of a norm, not a model.
ROUNDINGS = {Path("builder/backends/cuda/fusions") / f"{name}.py" for name in
             ("matching", "moe", "qkv")}  # fmt: skip
# There the names mean kinds of vocabularies, and parsers of vLLM.
VOCABULARIES = {
    Path("builder/checkpoint/gguf/pre_tokenizers.py"),
    Path("builder/checkpoint/gguf/tokenizer.py"),
    Path("cli/options/server.py"),
    Path("runtime/serve/parsers/output_formats.py"),
    Path("runtime/serve/parsers/reasoning.py"),
    Path("runtime/serve/parsers/tool_call_formats.py"),
}


# The files of a kind of drafter, by their suffixes: its record, its code, its families.
PACKAGES = ("builder", "cli", "runtime")
OWN_FILES = {
    kind: re.compile(
        rf"runtime/engine_dir/drafters/{name}\.py|runtime/draft/{name}(_\w+)?\.py"
        rf"|builder/families/{name}/.*|builder/{name}_options\.py"
    )
    for kind in RECORDS
    for name in [kind.replace("-", "_")]
}
REGISTRIES = {
    Path("runtime/engine_dir/drafters/registry.py"),
    Path("runtime/draft/registry.py"),
    Path("builder/families/registry.py"),
}
# Files in which the word has another meaning, and the meaning.
OTHER_WORDS = {
    Path("builder/training/config.py"): "kinds that are trained",
    Path("builder/training/draft_kinds.py"): "kinds that are trained",
    Path("cli/options/vllm_flags.py"): "a method of vLLM",
    Path("cli/bench/modes/engines.py"): "a part of a mode, as users type it",
    Path("runtime/engine_dir/manifest.py"): "a feature of the format",
    Path("runtime/serve/request_fields.py"): "a field of the API",
}


def own_classes() -> set[str]:
    """Return the names of classes that only one kind of drafter has."""
    records = {name for record in RECORDS.values() for name in (record.__name__,)}
    hints = (field_types(record).get("geometry") for record in RECORDS.values())
    geometries = {hint.__name__ for hint in hints if isinstance(hint, type)}
    made = (kind.open for kind in HOST_KINDS.values())
    return records | geometries | {kind.__name__ for kind in made if isinstance(kind, type)}


def literals(file: Path) -> Iterator[tuple[int, str]]:
    """Return line and value of every string that is not a docstring."""
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


def test_families_do_not_import_each_other() -> None:
    folders = {file.parent.name for file in FAMILIES.glob("*/family.py")}
    assert folders == {*TARGETS, *DRAFTS}
    wrong = []
    for folder in folders:
        for file in sorted((FAMILIES / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            result = set(re.findall(r"specbuild\.builder\.families\.(\w+)", text))
            others = folders - {folder, BUILT_ON.get(folder)}
            wrong += [f"{file.relative_to(ROOT)}: {name}" for name in result & others]
    assert not wrong


def test_other_code_imports_families_through_the_registry() -> None:
    """Modules that create drafts or synthetic models of one kind may import its package."""
    allowed = {
        "builder/synth": {"eagle3"},
        "builder/training": {"dflash", "eagle3"},
    }
    folders = {*TARGETS, *DRAFTS}
    wrong = []
    for file in sorted(
        f for capacity in ("builder", "cli") for f in (ROOT / capacity).rglob("*.py")
    ):
        if file.is_relative_to(FAMILIES):
            continue
        place = file.relative_to(ROOT)
        result = set(
            re.findall(r"specbuild\.builder\.families\.(\w+)\.", file.read_text(encoding="utf-8"))
        )
        may = allowed.get("/".join(place.parts[:2]), set())
        wrong += [f"{place}: {name}" for name in (result & folders) - may]
    assert not wrong


def test_no_kind_of_drafter_is_named_outside_its_own_files() -> None:
    """Neither the kind as a string nor a class of one kind is used: no code depends on the kind."""
    classes = own_classes()
    assert {"DFlashGeometry", "MtpRecord", "SuffixRecord", "SuffixDrafter"} <= classes
    wrong, used = [], set()
    for file in sorted(f for package in PACKAGES for f in (ROOT / package).rglob("*.py")):
        place = file.relative_to(ROOT)
        if place in REGISTRIES:
            continue
        own = {kind for kind, files in OWN_FILES.items() if files.fullmatch(place.as_posix())}
        if own:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in classes]
        kinds = [text for _, text in literals(file) if text in RECORDS]
        if place in OTHER_WORDS and kinds:
            used.add(place)
            kinds = []
        wrong += [f"{place}: {name}" for name in (*names, *kinds)]
    assert not wrong
    assert used == set(OTHER_WORDS)
