"""House rules that no linter checks; `make lint` runs the linters."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("builder", "cli", "plugins_cuda", "runtime")
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
# Functions that are longer or have more parameters, with reasons. See `counted` for the rules.
LONG_FUNCTIONS = {
    "builder/backends/cuda/step/programs.py:step_program": "one line for each part of a step",
    "builder/backends/cuda/step/views.py:view_rows": "the ports of one op after the other",
    "builder/backends/tensorrt/standard/attention.py:_attended": "the op's inputs",
    "builder/backends/tensorrt/standard/profiles.py:role_profiles": "a table: roles and ports",
    "builder/engine/sizes.py:compute_engine_sizes": "each size follows from those before",
    "builder/families/parts/mla.py:forward": "the layer's inputs, as its graph names them",
    "builder/families/gpt_oss/latent_attention.py:forward": "as above",
    "builder/families/parts/attention.py:forward": "as above",
    "builder/families/parts/gated_delta.py:forward": "as above",
    "builder/families/parts/attention.py:write_and_attend": "as above",
    "builder/families/parts/target.py:forward": "as above",
    "builder/graphs.py:target_graph": "a table: the graph's inputs and outputs",
    "builder/training/heads/attention.py:_attention": "the op's inputs",
    "builder/training/self_text.py:write_rows": "the file's columns",
    "cli/bench/report.py:phase_of": "a phase's measured values",
    "cli/bench/steps.py:_phase": "as above",
    "plugins_cuda/kv_block_select/body.py:best_blocks": "the op's inputs and attributes",
    "plugins_cuda/linear/streaming.py:_cut": "one case after the other",
    "plugins_cuda/mla_attention/body.py:key_positions": "the op's inputs and attributes",
    "plugins_cuda/moe/contrib.py:contrib_body": "as above",
    "plugins_cuda/moe/dense.py:dense_body": "as above",
    "plugins_cuda/moe/dense.py:dense_weights": "as above",
    "plugins_cuda/moe/op.py:route": "as above",
    "plugins_cuda/paged_tree_attention/body.py:additive_mask": "as above",
    "plugins_cuda/view_inputs/op.py:reference": "one port after the other",
    "plugins_cuda/rms_moe/memory.py:_lay_out": "the sizes of every buffer",
    "runtime/decode/device/program_table.py:step": "each parameter is a step's property",
    "runtime/decode/device/decoder.py:__init__": "the parts that an engine passes to its decoder",
    "runtime/decode/host/stepper.py:__init__": "the parts that a decoder passes to its stepper",
    "runtime/decode/scheduler.py:__init__": "each parameter limits what runs together",
    "runtime/generate_params.py:__init__": "a keyword for each parameter",
    "runtime/engine.py:__init__": "the parts of an engine, each of which tests replace alone",
}
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
        if lines > MAX_LINES:
            long[str(file.relative_to(ROOT))] = lines
    assert not long


def counted(file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Return the counted lines and parameters.

    A command has a parameter for each option and its help as docstring; an op's reference and cases
    have one for each input and attribute. Only their bodies count.
    """
    first = function.body[0]
    place = file.relative_to(ROOT)
    is_command = place.parent == Path("cli/commands") or place == Path("cli/bench/command.py")
    is_reference = function.name == "reference" or file.stem == "cases"
    public = not function.name.startswith("_")
    if public and (is_command or (place.parts[0] == "plugins_cuda" and is_reference)):
        described = ast.get_docstring(function) is not None and len(function.body) > 1
        start = function.body[1] if described else first
        return (function.end_lineno or 0) - start.lineno + 1, 0
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    own = [name for name in names if name not in {"self", "cls"}]
    rest = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return (function.end_lineno or 0) - function.lineno + 1, len(own) + len(rest)


def long_functions() -> dict[str, tuple[int, int]]:
    """Return lines and parameters of every function with too many of either, by file and name."""
    by_key = {}
    for file in python_of(*SOURCES):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, parameters = counted(file, node)
                if lines > MAX_FUNCTION_LINES or parameters > MAX_PARAMETERS:
                    name = f"{file.relative_to(ROOT).as_posix()}:{node.name}"
                    by_key[name] = (lines, parameters)
    return by_key


def test_functions_are_short_and_have_few_parameters() -> None:
    result = long_functions()
    assert not {name: result[name] for name in result if name not in LONG_FUNCTIONS}
    assert not {name for name in LONG_FUNCTIONS if name not in result}, "take these off the list"


def test_file_names_are_specific() -> None:
    assert not [file for file in ours() if FORBIDDEN_NAMES & {file.stem, *file.parts}]


def test_environment_variables_are_read_in_the_command_line_only() -> None:
    wrong = []
    # runtime/__init__.py sets one, for a library that would otherwise send usage data
    files = set(python_of("runtime", "plugins_cuda", "builder")) - {ROOT / "runtime/__init__.py"}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = {"environ", "getenv", "environb", "putenv"}
            if isinstance(node, ast.Attribute) and node.attr in names:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_sources_contain_no_absolute_path() -> None:
    wrong = []
    for file in files_of(*SOURCES, "examples", "benchmarks"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if ABSOLUTE_PATH.search(line):
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong


def test_sources_contain_no_unfinished_work() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert not [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files_of(*SOURCES)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]


def test_modules_have_docstrings() -> None:
    assert not [
        str(file.relative_to(ROOT))
        for file in python_of(*SOURCES)
        if file.name != "__init__.py"
        and ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) is None
    ]


def test_static_shared_variables_have_no_explicit_alignment() -> None:
    """NVRTC sometimes places such variables in another order: equal builds would differ."""
    aligned = re.compile(r"__align__\(\d+\) __shared__|(?<!extern )__shared__ (__align__|alignas)")
    assert not [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files_of("plugins_cuda", suffixes=(".cu", ".cuh"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if aligned.search(line)
    ]
