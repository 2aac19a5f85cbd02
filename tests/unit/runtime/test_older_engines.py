"""Engines of other versions: they load, or their error has the command that rebuilds them.

``engine_0_1_0`` has the manifest and the build report of the example's engine, as specbuild 0.1.0
wrote them. Never change these files.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from engine_directory import write_manifest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild import runtime
from specbuild.builder.options import BuildOptions
from specbuild.cli.main import main
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.files import check_sizes, manifest_digest, read_manifest
from specbuild.runtime.engine_dir.rebuild import build_command, naming_build_command
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError

OLDER = Path(__file__).with_name("engine_0_1_0")
ADVICE = re.compile(r"; (?:build|rebuild) (?:the engine|it)(?: again)?$")
COMMAND = "specbuild build --model CHECKPOINT --draft DRAFT --output {} --backend cpu --force"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The engine's directory. Its large files are holes of the same sizes."""
    path = tmp_path / "engine"
    path.mkdir()
    data = (OLDER / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_text(manifest_digest(data))
    for name, entry in json.loads(data)["files"].items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        stored = OLDER / name
        if stored.is_file():
            file.write_bytes(stored.read_bytes())
            continue
        with file.open("wb") as hole:
            hole.truncate(entry["bytes"])
    return path


def test_an_engine_of_0_1_0_is_read(engine: Path) -> None:
    """If the format changes, the refusal has the command that builds the engine again."""
    if FORMAT_VERSION != 3:
        with pytest.raises(EngineFileError) as refused:
            read_manifest(engine)
        assert COMMAND.format(engine) in str(refused.value)
        return
    manifest = read_manifest(engine)
    assert manifest.specbuild_version == "0.1.0"
    assert (manifest.target.model_type, manifest.target.layers) == ("gpt_oss", 24)
    assert [drafter.kind for drafter in manifest.drafters] == ["eagle3"]
    assert [group.name for group in manifest.cache_groups] == ["full", "sliding", "draft"]


def test_check_and_inspect_read_an_engine_of_0_1_0(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [main(["check", str(engine)]), main(["inspect", str(engine), "--json"])]
    written = capsys.readouterr()
    if FORMAT_VERSION != 3:
        assert codes == [2, 2]
        assert COMMAND.format(engine) in " ".join(written.err.split())
        return
    assert codes == [0, 0], written.err
    assert f"{engine} can run on this machine" in written.out
    assert json.loads(written.out.splitlines()[-1])["specbuild_version"] == "0.1.0"


def of_version(folder: Path, version: object, **changes: Any) -> Path:
    """Write the manifest of 0.1.0 with another format version."""
    stored = json.loads((OLDER / "manifest.json").read_text(encoding="utf-8"))
    write_manifest(folder, {**stored, "format_version": version, **changes})
    return folder


@pytest.mark.parametrize("command", ["check", "inspect", "run"])
@pytest.mark.parametrize("version", [1, 2, None, "3", True])
def test_older_versions_give_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: object, command: str
) -> None:
    options = {"max_seq_len": 4096, "no_mla": True, "dsa": False, "kv_memory": None}
    engine = of_version(tmp_path, version, options=options)
    arguments = ["--prompt", "a"] if command == "run" else []
    assert main([command, str(engine), *arguments]) == 2
    sentence = capsys.readouterr().err
    assert sentence.rstrip().endswith(
        "build the engine again: specbuild build --model CHECKPOINT --draft DRAFT "
        f"--output {engine} --backend cpu --no-dsa --max-seq-len 4096 --no-mla --force"
    )
    assert "(specbuild 0.1.0)" in sentence


def test_newer_versions_ask_for_an_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = of_version(tmp_path, FORMAT_VERSION + 1, specbuild_version="9.9.9")
    assert main(["check", str(engine)]) == 2
    sentence = capsys.readouterr().err.strip()
    assert "of a newer specbuild (specbuild 9.9.9)" in sentence
    assert sentence.endswith(f"reads {FORMAT_VERSION}: update specbuild")


def test_unknown_keys_give_the_command(tmp_path: Path) -> None:
    engine = of_version(tmp_path, FORMAT_VERSION, mood="calm")
    with pytest.raises(EngineFileError, match="unknown keys mood; build the engine again: spec"):
        read_manifest(engine)


def test_advice_to_rebuild_includes_the_command(engine: Path) -> None:
    manifest = read_manifest(engine)
    advice = "role draft has no hidden; build the engine again"
    assert str(OutdatedEngineError("role draft has no hidden")) == advice
    with pytest.raises(EngineFileError) as refused, naming_build_command(engine, manifest):
        raise OutdatedEngineError("role draft has no hidden")
    stored = json.loads((OLDER / "manifest.json").read_text(encoding="utf-8"))
    assert str(refused.value) == f"{advice}: {build_command(engine, stored)}"
    outer = OutdatedEngineError.of("plan.json", refused.value, "specbuild build")
    assert str(outer) == f"plan.json: {advice}: specbuild build"
    again = pickle.loads(pickle.dumps(outer))
    assert (str(again), again.command) == (str(outer), "specbuild build")


def test_only_one_class_states_this_advice_alone() -> None:
    """The class adds the command, so a message of another class would lack it."""
    spelled_out = []
    for file in Path(runtime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id == "EngineFileError":
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                spelled_out += [f"{file}: {text}" for text in texts if ADVICE.search(str(text))]
    assert not spelled_out


def test_advice_to_copy_an_engine_is_unchanged(engine: Path) -> None:
    """The advice to copy an engine does not change: a build is not the only remedy."""
    (engine / "build_report.json").unlink()
    manifest = read_manifest(engine)
    with pytest.raises(EngineFileError) as refused, naming_build_command(engine, manifest):
        check_sizes(engine, manifest)
    assert str(refused.value).endswith("is missing; copy the engine again or rebuild it")


def test_recorded_options_are_options_of_build(capsys: pytest.CaptureFixture[str]) -> None:
    """The command has only options of ``build``."""
    recorded = BuildOptions(model=Path("m"), output=Path("o")).recorded()
    options: dict[str, Any] = dict.fromkeys(recorded, 7)
    options |= {name: True for name, value in recorded.items() if isinstance(value, bool)}
    words = shlex.split(build_command(Path("e"), {"options": options | {"dsa": True}}))
    assert main(["build", "--help"]) == 0
    described = capsys.readouterr().out
    flags = [word for word in words[2:] if word.startswith("--")]
    assert len(flags) > 30
    for flag in flags:
        assert flag in described, flag


@examples(200)
@given(
    decoded=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["drafters", "options", "backend", "kind"]) | st.text(), inner
            )
        ),
    )
)
def test_any_manifest_gives_one_line(decoded: Any) -> None:
    command = build_command(Path("engine"), decoded)
    assert command.startswith("specbuild build --model CHECKPOINT ")
    assert command.isprintable()
    assert shlex.split(command)[-1] == "--force"
