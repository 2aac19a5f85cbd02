"""The values of MODEL on a command line, and the downloaded files of a hub repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.cli.model.hub import chosen_files
from specbuild.cli.model.reference import (
    CheckpointReference,
    EngineReference,
    HubReference,
    model_reference,
)
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an engine, a checkpoint and two folders of GGUF files."""
    for name in ("engine/manifest.json", "target/config.json", "one/a.gguf", "many/a.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "many/b.gguf").touch()
    (tmp_path / "renamed.bin").write_bytes(b"GGUF rest")
    (tmp_path / "README.md").write_text("text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_paths_that_exist() -> None:
    assert model_reference("engine") == EngineReference(Path("engine"))
    assert model_reference("target/") == CheckpointReference(Path("target"), "target")
    assert model_reference("one/a.gguf") == CheckpointReference(Path("one/a.gguf"), "a")
    assert model_reference("one") == CheckpointReference(Path("one/a.gguf"), "one")
    assert model_reference("renamed.bin") == CheckpointReference(Path("renamed.bin"), "renamed")


@pytest.mark.usefixtures("folder")
def test_hub_ids() -> None:
    assert model_reference("Qwen/Qwen3-8B") == HubReference("Qwen/Qwen3-8B")
    quantized = model_reference("unsloth/Qwen3-8B-GGUF:Q4_K_M")
    assert quantized == HubReference("unsloth/Qwen3-8B-GGUF", "Q4_K_M")
    assert quantized.title == "unsloth/Qwen3-8B-GGUF:Q4_K_M"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("engin", "engin does not exist; did you mean engine?"),
        ("target/confg.json", "did you mean target/config.json?"),
        ("one/x", "one/x does not exist"),
        ("missing.gguf", "missing.gguf does not exist"),
        ("models/missing.gguf", "models/missing.gguf does not exist"),
        ("a" * 300, "cannot be opened: File name too long"),
        ("a/" * 3000 + "x", "cannot be opened: File name too long"),
        ("qwen3", "a Hugging Face id has the form ORGANISATION/NAME"),
        ("many", "many holds 2 GGUF models: give one, many/a.gguf"),
        ("README.md", "is a file, not a directory, and no GGUF file"),
        (".", "neither an engine directory (manifest.json is missing) nor a checkpoint"),
        ("a/b/c", "a/b/c does not exist"),
        (f"{'o' * 50}/{'n' * 50}", "does not exist"),
    ],
)
def test_rejects_invalid_references(text: str, sentence: str) -> None:
    with pytest.raises(SpecbuildError) as caught:
        model_reference(text)
    assert sentence in str(caught.value)


SAFETENSORS = ["model.safetensors", "config.json", "chat_template.jinja"]
SPLIT = [f"Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]


@pytest.mark.parametrize(
    ("reference", "names", "chosen"),
    [
        ("a/b", [*SAFETENSORS, "m-Q4_K_M.gguf"], SAFETENSORS),
        ("a/b:q4_k_m", [*SAFETENSORS, "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        ("a/b", ["m-Q8_0.gguf", "config.json"], ["m-Q8_0.gguf"]),
        ("a/b", ["m-Q8_0.gguf", "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        ("a/b:Q8_0", [*SPLIT, "m-Q4_K_M.gguf"], SPLIT),
    ],
)
def test_files_of_a_repository(reference: str, names: list[str], chosen: list[str]) -> None:
    hub = model_reference(reference)
    assert isinstance(hub, HubReference)
    assert chosen_files(hub, names) == chosen


@pytest.mark.parametrize(
    ("reference", "names", "sentence"),
    [
        ("a/b", ["pytorch_model.bin", "config.json"], "holds no safetensors or GGUF files"),
        ("a/b:Q8_0", SAFETENSORS, "holds no GGUF files"),
        ("a/b", ["m-Q8_0.gguf", "m-Q6_K.gguf"], "give one as a/b:VARIANT"),
        ("a/b:Q5", ["m-Q8_0.gguf", "m-Q6_K.gguf"], "holds 2 GGUF models (m-Q6_K.gguf, m-Q8_0"),
    ],
)
def test_a_repository_without_the_files(reference: str, names: list[str], sentence: str) -> None:
    hub = model_reference(reference)
    assert isinstance(hub, HubReference)
    with pytest.raises(SpecbuildError) as caught:
        chosen_files(hub, names)
    assert sentence in str(caught.value)
