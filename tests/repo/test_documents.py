"""README, docs and help texts: links and citations resolve, commands exist and can be parsed."""

from __future__ import annotations

import ast
import io
import re
import shlex
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from page_commands import LANGUAGES, PAGES, blocks, commands, left_by
from page_folder import STAND_INS
from script_modules import load_script

from specbuild.cli.main import command_line

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
# Pages for users; lines of command-line options are long.
GENERATED = {ROOT / "docs" / name for name in ("cli.md", "python-reference.md")}
USER_PAGES = sorted(set((ROOT / "docs").glob("*.md")) - GENERATED)
DEVELOPER_PAGES = sorted((ROOT / "docs" / "developers").glob("*.md"))
SHORT_SENTENCES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *USER_PAGES,
    *DEVELOPER_PAGES,
    RESULTS / "README.md",
    ROOT / "examples" / "tiny-gpt-oss" / "README.md",
]
FOLDERS = ("runtime", "plugins_cuda", "builder", "cli", "tests", "benchmarks", "examples", "docs")
# A path from the root, with an optional section: docs/developers/contracts.md#graphs.
CITED = re.compile(r"(?<![\w/.-])([\w./-]+\.md)\b(?:#([\w-]+))?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = typer.main.get_command(command_line())


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(document: Path) -> set[str]:
    """Return the anchors of a document, as GitHub generates them."""
    lines = document.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def shell_lines(page: Path) -> list[str]:
    """Return the commands of the shell blocks."""
    return [line for language, text in blocks(page) if language == "sh" for line in commands(text)]


def help_texts() -> dict[str, str]:
    """Return the help of every command, by its name on the command line."""
    texts = {}
    for name, command in COMMANDS.commands.items():
        for sub_name, sub in getattr(command, "commands", {"": command}).items():
            texts[f"{name} {sub_name}".strip()] = sub.help or ""
    return texts


def parse(line: str) -> None:
    """Parse a ``specbuild`` command without running it. Raise if it is invalid."""
    words = shlex.split(line, comments=True)
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "<", ">")), None)]
    assert words[0] == "specbuild"
    command, words = COMMANDS, words[1:]
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    assert command is not COMMANDS or words[0].startswith("--"), f"no such command: {line}"
    if "--help" not in words and "--version" not in words:
        command.make_context(command.name, words)


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the configuration file that a parsed command may read."""
    STAND_INS["engine.yaml"](tmp_path / "engine.yaml")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_links_resolve(document: Path) -> None:
    unresolved = []
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in headings(target)):
            unresolved.append(link)
    assert not unresolved


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
@pytest.mark.usefixtures("configuration")
def test_commands_of_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(document):
        words = shlex.split(line, comments=True)
        if words and words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words and words[0] == "specbuild":
            parse(line)


def test_readme_opens_with_the_two_commands() -> None:
    assert shell_lines(ROOT / "README.md")[:2] == ["make demo", "make test"]


def test_every_block_of_a_page_states_its_language() -> None:
    """``tests/e2e/test_page_commands.py`` selects blocks by their language."""
    assert {name for page in PAGES for name, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_of_pages_use_existing_checkpoints(page: Path) -> None:
    lines = [line for line in shell_lines(page) if left_by(line) is None]
    outputs = {name for line in lines for name in re.findall(r"--output (\S+)", line)}
    named = {name for line in lines for name in re.findall(r"--(?:model|draft) ([^\s-]\S*)", line)}
    lacking = {name for name in named - outputs - set(STAND_INS) if not (ROOT / name).exists()}
    assert not lacking, "tests/page_folder.py has no stand-in for them"


def script(path: str) -> ModuleType:
    """Return a script of the repository as a module; it may import others of its folder."""
    folder = str((ROOT / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return load_script(ROOT / path)


def test_the_command_line_document_is_current() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert script("docs/write_cli.py").page(written) == written, "run: make docs"


def test_the_python_reference_is_current() -> None:
    reference = script("docs/write_python.py")
    written = reference.PAGE.read_text(encoding="utf-8")
    assert reference.page() == written, "run: make docs"


def test_the_api_file_is_current() -> None:
    written = (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8")
    assert script("docs/write_openapi.py").document_text() == written, "run: make docs"


def test_the_table_of_request_fields_is_current() -> None:
    fields = script("docs/write_request_fields.py")
    written = fields.PAGE.read_text(encoding="utf-8")
    assert fields.page(written) == written, "run: make docs"


def test_the_table_of_models_is_current() -> None:
    """A test or a record must show the runs that it states."""
    models = script("docs/write_models.py")
    written = models.PAGE.read_text(encoding="utf-8")
    assert models.page(written) == written, "run: make docs"
    assert [
        cells_with_sources
        for cells_with_sources in models.RUN.values()
        if not (ROOT / cells_with_sources).exists()
    ] == []
    kinds = {kind for family in models.TARGETS.values() for kind in family.model_types}
    assert {kind for _, kind in models.RUN} <= kinds | models.DRAFTS.keys()


def test_the_table_of_quantized_formats_is_current() -> None:
    formats = script("docs/write_quantised.py")
    written = formats.PAGE.read_text(encoding="utf-8")
    assert formats.page(written) == written, "run: make docs"


def test_the_tables_of_kernels_are_current() -> None:
    dispatch = script("docs/write_dispatch.py")
    written = dispatch.FILE.read_text(encoding="utf-8")
    assert written.count("<!-- dispatch ") == len(dispatch.TABLES)
    assert dispatch.page(written) == written, "run: make docs"


def test_numbers_of_documents_equal_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = script("benchmarks/figures.py")
    for document in figures.documents():
        text = document.read_text(encoding="utf-8")
        assert figures.filled(text) == text, f"{names(document)}: run make docs"
    for file, picture in figures.PICTURES.items():
        assert file.read_text(encoding="utf-8") == picture(), "run: make docs"
        assert 'width="600"' in picture()


def index_of_records() -> list[list[str]]:
    """Return the files that each line of the index lists, by folder.

    A name alone is in the folder of the previous name.
    """
    text = (RESULTS / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    lines = []
    for names_of_line in (re.findall(r"`([^`]+)`", cell) for cell in cells):
        folder, paths = "", []
        for name in names_of_line:
            folder = name.rpartition("/")[0] or folder
            paths.append(f"{folder}/{name.rpartition('/')[2]}" if folder else name)
        lines.append(paths)
    return lines


def test_the_index_lists_every_record() -> None:
    """A pattern begins with a word: one of a folder would include undescribed records."""
    named = [path for line in index_of_records() for path in line]
    assert [path for path in named if not re.match(r"\w+", path.rpartition("/")[2])] == []
    result = {path: set(RESULTS.glob(path)) for path in named}
    assert [path for path, files in result.items() if not files] == []
    notes = set((RESULTS / "notes").iterdir()) | {RESULTS / "README.md"}
    records = {file for file in RESULTS.rglob("*") if file.is_file()} - notes
    assert records == set().union(*result.values())


def test_failed_experiments_cite_existing_records() -> None:
    table = (
        (RESULTS / "README.md").read_text(encoding="utf-8").partition("\n## What did not help")[2]
    )
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert all(len(row) == 4 and row[2].strip() for row in rows)
    cited = [record for row in rows for record in re.findall(r"`([^`]+)`", row[3])]
    assert cited
    assert [record for record in cited if not (RESULTS / record).is_file()] == []


def sentences(text: str) -> Iterator[str]:
    """Return sentences, table cells and list items of a page.

    Code counts as one word, numbers do not.
    """
    text = re.sub(r"```.*?```|<!-- figures.*?end of figures -->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    for part in re.split(r"\n\s*\n|\n(?=[-|#])|(?<=\S)\s*\|", text):
        yield from re.split(r"(?<=[.:;?!])\s+", part.strip("|-# \n"))


def test_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    pages = [*USER_PAGES, *DEVELOPER_PAGES]
    lines = {names(page): len(page.read_text(encoding="utf-8").splitlines()) for page in pages}
    assert {name: count for name, count in lines.items() if count > 200} == {}


@pytest.mark.parametrize("page", SHORT_SENTENCES, ids=names)
def test_sentences_of_pages_are_short(page: Path) -> None:
    """A sentence has at most 30 words and four numbers, and does not describe former states."""
    for sentence in sentences(page.read_text(encoding="utf-8")):
        assert len(sentence.split()) <= 30, sentence
        assert len(re.findall(r"\b\d[\d.,]*", sentence)) <= 4, sentence
        assert not re.search(
            r"\b([Uu]sed to|since then|no longer|[Ff]ormerly|[Pp]reviously|[Uu]ntil now)\b",
            sentence,
        ), sentence


@pytest.mark.parametrize("name", sorted(help_texts()))
@pytest.mark.usefixtures("configuration")
def test_help_examples_parse(name: str) -> None:
    examples = [
        line.strip()
        for line in help_texts()[name].splitlines()
        if line.strip().startswith("specbuild ")
    ]
    assert examples
    for line in examples:
        assert line.startswith(f"specbuild {name}")
        parse(line)


@pytest.mark.parametrize("name", sorted(help_texts()))
def test_every_command_takes_debug(name: str) -> None:
    command = COMMANDS
    for word in name.split():
        command = command.commands[word]
    assert "--debug" in {option for parameter in command.params for option in parameter.opts}


def sources() -> list[Path]:
    suffixes = {".py", ".cu", ".cuh", ".cpp", ".h", ".c"}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    return [ROOT / "Makefile", *sorted(file for file in files if file.suffix in suffixes)]


def prose(text: str) -> Iterator[str]:
    """Return docstrings and comments of a Python source.

    Other strings may be names of output files.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def exists(path: str, section: str) -> bool:
    document = ROOT / path
    return document.is_file() and (not section or section in headings(document))


def unresolved(text: str) -> list[str]:
    """Return the citations of a text that do not resolve."""
    return [
        f"{path}#{section}" for path, section in CITED.findall(text) if not exists(path, section)
    ]


def test_citations_in_sources_resolve() -> None:
    wrong = {}
    for file in sources():
        text = file.read_text(encoding="utf-8")
        parts = prose(text) if file.suffix == ".py" and ".md" in text else [text]
        if result := [citation for part in parts for citation in unresolved(part)]:
            wrong[str(file.relative_to(ROOT))] = result
    assert not wrong


def test_detects_missing_documents_and_sections() -> None:
    assert not unresolved("(docs/developers/contracts.md#graphs), and README.md.")
    missing, section = "nowhere" + ".md", "README" + ".md#nowhere"
    assert unresolved(f"see {missing}") and unresolved(f"see {section}")


@pytest.mark.parametrize("package", ["runtime", "builder"])
def test_the_architecture_page_lists_every_package(package: str) -> None:
    """The page also lists every module, except those that only declare, draw or parse options."""
    text = (ROOT / "docs" / "developers" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition(f"| in `{package}/` |")[2].partition("\n\n")[0]
    named = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", table)}
    parts = {p.name for p in (ROOT / package).iterdir() if p.is_dir() or p.suffix == ".py"}
    unnamed = {"__init__.py", "__pycache__", "svg.py", "option_group.py", "option_readers.py"}
    assert parts - unnamed <= named


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=names)
def test_files_in_pages_exist(page: Path) -> None:
    named = re.findall(r"`((?:runtime|plugins_cuda|builder|cli|tests)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
