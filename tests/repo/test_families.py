"""What belongs to one model family stands in its folder, and nowhere else in the code."""

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
# A draft that is one of another family with something more.
BUILT_ON = {"p_eagle": "eagle3"}
# It names a norm's rounding there, not a model.
ROUNDINGS = {Path("builder/backends/cuda/fusions") / f"{name}.py" for name in
             ("matching", "moe", "qkv")}  # fmt: skip
# They name kinds of vocabularies there, and parsers of vLLM.
VOCABULARIES = {
    Path("builder/checkpoint/gguf/pre_tokenizers.py"),
    Path("builder/checkpoint/gguf/tokenizer.py"),
    Path("cli/options/server.py"),
    Path("runtime/serve/parsers/output_formats.py"),
    Path("runtime/serve/parsers/reasoning.py"),
    Path("runtime/serve/parsers/tool_call_formats.py"),
}


# The files of a kind of drafter, by the end of their names: its record, its code, its families.
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
# Where the word is another's, and whose.
OTHER_WORDS = {
    Path("builder/training/config.py"): "kinds that are trained",
    Path("builder/training/draft_kinds.py"): "kinds that are trained",
    Path("cli/options/vllm_flags.py"): "a method of vLLM",
    Path("cli/bench/modes/engines.py"): "a part of a mode, as users type it",
    Path("runtime/engine_dir/manifest.py"): "a feature of the format",
    Path("runtime/serve/request_fields.py"): "a field of the API",
}


def own_classes() -> set[str]:
    """The names of classes that one kind of drafter alone has."""
    records = {name for record in RECORDS.values() for name in (record.__name__,)}
    hints = (field_types(record).get("geometry") for record in RECORDS.values())
    geometries = {hint.__name__ for hint in hints if isinstance(hint, type)}
    made = (kind.open for kind in HOST_KINDS.values())
    return records | geometries | {kind.__name__ for kind in made if isinstance(kind, type)}


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


def test_no_kind_of_drafter_is_named_outside_its_own_files() -> None:
    """Neither a kind as a string, nor a class that one kind alone has: no code asks which it is."""
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
