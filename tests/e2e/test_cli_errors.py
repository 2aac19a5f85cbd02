"""Invalid input: one line on standard error, exit code 2, and no partial output."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_draft, write_target
from command_line import Command
from safetensors.torch import load_file, save_file

MEBIBYTE = 1 << 20


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def change_config(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_manifest(engine: Path, **changes: Any) -> None:
    """Change the manifest and its checksum, as another program may write it."""
    file = engine / "manifest.json"
    data = json.dumps(json.loads(file.read_text()) | changes).encode()
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (engine / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


@pytest.fixture
def build_refused(command: Command, tmp_path: Path) -> Callable[..., None]:
    """Assert that a build fails with these messages and leaves no output."""
    place = tmp_path / "place"
    place.mkdir()

    def refused(model: Path, *arguments: object, messages: tuple[str, ...]) -> None:
        output = place / "engine"
        assert command("build", "--model", model, "--output", output, *arguments).refused(*messages)
        assert not list(place.iterdir())

    return refused


BuildRefused = Callable[..., None]


def test_rejects_a_missing_directory(build_refused: BuildRefused, tmp_path: Path) -> None:
    build_refused(tmp_path / "nowhere", messages=("nowhere", "no such directory"))


def test_rejects_a_directory_without_a_checkpoint(
    build_refused: BuildRefused, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    build_refused(tmp_path / "empty", messages=("empty", "config.json"))


def test_an_unsupported_model_type_lists_the_supported_ones(
    build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    model = copied(target_path, tmp_path / "target")
    change_config(model, model_type="mamba")
    build_refused(model, messages=("mamba", "gpt_oss"))


def test_lists_missing_unexpected_and_misshapen_tensors_together(
    build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    model = copied(target_path, tmp_path / "target")

    def change(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.1.self_attn.sinks"]
        tensors["model.layers.0.surplus"] = tensors["model.norm.weight"].clone()
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    change_tensors(model, change)
    names = ("model.layers.1.self_attn.sinks", "model.layers.0.surplus", "model.norm.weight")
    build_refused(model, messages=names)


def test_rejects_a_draft_of_another_hidden_size(
    build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    write_draft(tmp_path / "draft", target_hidden=32)
    build_refused(target_path, "--draft", tmp_path / "draft", messages=("draft", "64"))


def test_rejects_a_draft_of_another_vocabulary(
    build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    write_draft(tmp_path / "draft", target_vocab=512)
    build_refused(target_path, "--draft", tmp_path / "draft", messages=("256", "512"))


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--max-seq-len", 0), ("--max-seq-len",)),
        (("--max-seq-len", 1), ("--max-seq-len 1", "ask for 2 to")),
        (("--max-batch-size", -1), ("--max-batch-size", "build --help")),
        (("--page-size", 0), ("--page-size",)),
        (("--max-seq-len", 513), ("513", "512")),
        (("--draft-top-k", 2, "--draft-depth", 2, "--draft-tokens", 7), ("7", "6")),
        (("--draft-tokens", 0), ("--draft-tokens",)),
        (("--backend", "abacus"), ("abacus", "cpu")),
    ],
)
def test_rejects_invalid_limits(
    build_refused: BuildRefused,
    target_path: Path,
    draft_path: Path,
    arguments: tuple[object, ...],
    messages: tuple[str, ...],
) -> None:
    build_refused(target_path, "--draft", draft_path, *arguments, messages=messages)


def test_rejects_draft_options_without_a_draft(
    build_refused: BuildRefused, target_path: Path
) -> None:
    build_refused(target_path, "--draft-top-k", 2, messages=("--draft-top-k", "--draft"))


def test_an_unknown_config_field_is_a_warning_or_with_strict_an_error(
    command: Command, build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    model = copied(target_path, tmp_path / "target")
    change_config(model, brand_new_field=3)
    build_refused(model, "--strict", messages=("brand_new_field",))
    result = command("build", "--model", model, "--output", tmp_path / "engine")
    assert result.code == 0
    assert result.err.count("brand_new_field") == 1


@pytest.mark.slow
def test_a_full_disk_leaves_no_output(tmp_path: Path) -> None:
    """Files are limited to 1 MiB, as on a full disk; the weights are larger."""
    write_target(tmp_path / "target", hidden=128, layers=6, inner=64)
    output = tmp_path / "place" / "engine"
    output.parent.mkdir()
    line = [sys.executable, "-m", "specbuild.cli.main", "build"]
    done = subprocess.run(
        [*line, "--model", str(tmp_path / "target"), "--output", str(output)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, MEBIBYTE)),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "free some space" in done.stderr.splitlines()[-1]
    assert not list(output.parent.iterdir())


ENGINE_COMMANDS = ("run", "inspect", "check", "bench", "verify")


def on_engine(command: Command, name: str, engine: Path) -> Any:
    extra: tuple[object, ...] = ()
    if name == "run":
        extra = ("--prompt", "x")
    if name == "verify":
        extra = ("--model", engine)
    words = ("bench", "pairs") if name == "bench" else (name,)
    return command(*words, engine, *extra)


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_rejects_a_directory_without_an_engine(command: Command, tmp_path: Path, name: str) -> None:
    assert on_engine(command, name, tmp_path / "nowhere").refused("nowhere")
    (tmp_path / "empty").mkdir()
    assert on_engine(command, name, tmp_path / "empty").refused("manifest.json")
    (tmp_path / "file").write_text("x")
    assert on_engine(command, name, tmp_path / "file").refused("a file, not a directory")


def test_verify_rejects_a_target_as_the_draft(
    command: Command, tiny_engine: Path, text_target: Path
) -> None:
    arguments = ("--model", text_target, "--draft", text_target)
    assert command("verify", tiny_engine, *arguments).refused("no fc.weight")


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_rejects_another_format_version(
    command: Command, tiny_engine: Path, tmp_path: Path, name: str
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    change_manifest(engine, format_version=99)
    assert on_engine(command, name, engine).refused("99")


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_rejects_another_backend(
    command: Command, tiny_engine: Path, tmp_path: Path, name: str
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    change_manifest(engine, backend="abacus")
    assert on_engine(command, name, engine).refused("abacus")


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_rejects_a_flipped_byte_in_the_manifest(
    command: Command, tiny_engine: Path, tmp_path: Path, name: str
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    data = bytearray((engine / "manifest.json").read_bytes())
    data[len(data) // 2] ^= 1
    (engine / "manifest.json").write_bytes(data)
    assert on_engine(command, name, engine).refused("manifest.json", "damaged")


@pytest.mark.parametrize("name", ["run", "check", "bench"])
@pytest.mark.parametrize("file", ["weights.safetensors", "target.onnx", "tokenizer.json"])
def test_rejects_a_truncated_or_missing_file(
    command: Command, tiny_engine: Path, tmp_path: Path, name: str, file: str
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    path = engine / file
    path.write_bytes(path.read_bytes()[:-1])
    assert on_engine(command, name, engine).refused(file)
    path.unlink()
    assert on_engine(command, name, engine).refused(file)


@pytest.mark.parametrize("file", ["weights.safetensors", "draft.onnx", "tokenizer.json"])
def test_run_rejects_a_flipped_bit(
    command: Command, tiny_engine: Path, tmp_path: Path, file: str
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    data = bytearray((engine / file).read_bytes())
    data[len(data) // 3] ^= 4
    (engine / file).write_bytes(data)
    assert on_engine(command, "run", engine).refused(file, "damaged")


@pytest.mark.parametrize("name", ["nowhere/speed.svg", "speed.png"])
def test_rejects_an_unwritable_chart_path_before_measuring(
    command: Command, tmp_path: Path, name: str
) -> None:
    arguments = ("--max-new-tokens", 2, "--rounds", 1, "--plot", tmp_path / name)
    assert command("bench", "pairs", tmp_path / "no engine yet", *arguments).refused(name)


def test_sweep_accepts_retrieved_tokens_for_specpv_only(command: Command, tmp_path: Path) -> None:
    arguments = ("bench", "sweep", tmp_path / "no engine yet", "decode", "--retrieved", 512)
    assert command(*arguments).refused("the phase specpv")


def test_rejects_a_comparison_of_drafts_that_change(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    fixed = ("--draft-top-k", 1, "--draft-depth", 2, "--draft-tokens", 2)
    short = ("--max-new-tokens", 4, "--rounds", 1)
    report = command("bench", "pairs", tiny_engine, *short, *fixed, "--json")
    (tmp_path / "a.json").write_text(report.out)
    again = command("bench", "pairs", tiny_engine, *short, *fixed, "--against", tmp_path / "a.json")
    assert again.code == 0 and "0.00 (0.0 %)" in again.out
    refused = command("bench", "pairs", tiny_engine, *short, "--against", tmp_path / "a.json")
    assert refused.refused("--against", "--draft-depth")


def test_verify_rejects_cuda_engines(
    command: Command, tiny_engine: Path, text_target: Path, tmp_path: Path
) -> None:
    engine = copied(tiny_engine, tmp_path / "engine")
    manifest = json.loads((engine / "manifest.json").read_text())
    (engine / "plan.json").write_text("{}")
    files = manifest["files"] | {"plan.json": {"bytes": 2, "xxh3_128": "0" * 32}}
    change_manifest(engine, backend="cuda", roles={}, drafters=[], files=files)
    result = command("verify", engine, "--model", text_target)
    assert result.refused("was built for cuda", "--backend cpu")


def test_build_rejects_a_damaged_tokenizer(
    build_refused: BuildRefused, text_target: Path, tmp_path: Path
) -> None:
    model = copied(text_target, tmp_path / "target")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text("{")
    build_refused(model, messages=("tokenizer.json", str(model)))


def test_rejects_a_file_as_the_folder_for_passes(
    build_refused: BuildRefused, target_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    dumped = ("--dump-passes", tmp_path / "file")
    build_refused(target_path, *dumped, messages=("--dump-passes", "is a file"))


def test_rejects_a_range_of_seeds_that_ends_too_high(
    command: Command, tmp_path: Path, tiny_engine: Path
) -> None:
    (tmp_path / "two.jsonl").write_text('{"id": "a", "prompt": "a"}\n{"id": "b", "prompt": "b"}\n')
    arguments = ("--prompts", tmp_path / "two.jsonl", "--seed", 2**64 - 1)
    assert command("run", tiny_engine, *arguments).refused(
        f"--seed {2**64 - 1}", "give -9223372036854775808 to"
    )


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_a_typo_in_a_path_suggests_an_existing_name(
    command: Command, tmp_path: Path, name: str
) -> None:
    (tmp_path / "my-engine").mkdir()
    result = on_engine(command, name, tmp_path / "my-engin")
    assert result.refused("does not exist; did you mean", str(tmp_path / "my-engine"))


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--max-tokens", "--max-new-tokens"),
        ("--text", "--prompt"),
        ("--temprature", "--temperature"),
    ],
)
def test_an_unknown_option_suggests_the_most_similar_one(
    command: Command, option: str, meant: str
) -> None:
    result = command("run", "engine", option, "1")
    assert result.refused(f"there is no option {option}: did you mean {meant}? See specbuild run")
