"""``run``, ``inspect`` and ``cache`` with checkpoints, which are built into cached engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from command_line import Command
from gguf_files import write_gguf

RUN = ("--max-new-tokens", 4, "--temperature", 0, "--json")
# Runs a command line, and fails if it imports torch.
LIGHT = """
import sys
from specbuild.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The engine cache that the ``command`` fixture uses."""
    return tmp_path / "cache" / "engines"


# A shell starts background jobs with SIGINT ignored, and tests may run in one.
CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
SPECBUILD = f"{CTRL_C}; import runpy; runpy.run_module('specbuild', run_name='__main__')"


def started(words: Sequence[object], cache: Path, code: str = SPECBUILD) -> subprocess.Popen[str]:
    """Start ``specbuild``, or a Python program with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env=os.environ | {"SPECBUILD_CACHE_DIR": str(cache.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_checkpoint_is_built_once_and_then_loaded(
    command: Command, cache: Path, text_target: Path, text_draft: Path, tmp_path: Path
) -> None:
    limits = ("--draft", text_draft, "--max-seq-len", 96, "--backend", "cpu")
    first = command("run", text_target, "ab", *limits, *RUN)
    assert first.code == 0, first.err
    (engine,) = (path for path in cache.iterdir() if path.is_dir())
    assert "building target for cpu, once" in first.err
    assert f"s: {engine} (" in " ".join(first.err.split())
    assert sorted(p.name for p in cache.iterdir()) == [engine.name, f"{engine.name}.json"]

    # The output equals that of an engine from the build command.
    built = tmp_path / "built"
    words = ("--model", text_target, "--draft", text_draft, "--max-seq-len", 96, "--output", built)
    assert command("build", *words).code == 0
    expected = command("run", built, "--prompt", "ab", *RUN).records[0]["output_ids"]
    assert first.records[0]["output_ids"] == expected

    again = started(("run", text_target, "ab", *limits, *RUN), cache, LIGHT)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert json.loads(out)["output_ids"] == expected
    assert "building" not in err


def test_other_inputs_and_options_build_other_engines(
    command: Command, cache: Path, text_target: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(text_target, copy)

    def engines(*options: object) -> int:
        assert command("run", copy, "a", "--max-seq-len", 64, *options, *RUN).code == 0
        return sum(path.is_dir() for path in cache.iterdir())

    assert engines() == 1
    os.utime(copy / "model.safetensors")
    assert engines() == 1, "the same contents"
    assert engines("--max-batch-size", 2) == 2
    assert engines("--drafter", "suffix") == 3
    listed = command("cache", "list", "--json").records
    assert [entry["draft"] for entry in listed] == ["suffix", None, None]
    config = tmp_path / "engine.yaml"
    config.write_text("build:\n  max-batch-size: 3\n", encoding="utf-8")
    assert engines("--config", config) == 4
    template = copy / "tokenizer_config.json"
    data = json.loads(template.read_text())
    template.write_text(json.dumps(data | {"chat_template": "{{ messages[0].content }}"}))
    assert engines() == 5


def test_the_cache_is_listed_and_cleared(command: Command, cache: Path, text_target: Path) -> None:
    assert "holds no engines" in command("cache", "list").out
    assert command("run", text_target, "a", "--max-seq-len", 64, *RUN).code == 0
    (listed,) = command("cache", "list", "--json").records
    engine = cache / listed["name"]
    size = sum(file.stat().st_size for file in engine.iterdir())
    assert (listed["model"], listed["backend"], listed["draft"]) == ("target", "cpu", None)
    assert listed["size_bytes"] == size
    assert listed["built"] <= listed["used"] <= time.time()
    table = command("cache", "list").out
    assert listed["name"].rpartition("-")[2] in table and str(cache) in table

    assert command("cache", "rm").refused("give ids of engines")
    assert command("cache", "rm", "none").refused("the cache has no engine none")
    assert "removed target-cpu-" in command("cache", "rm", "target").err
    assert not list(cache.iterdir())


def test_two_processes_build_one_engine(cache: Path, text_target: Path) -> None:
    words = ("run", text_target, "ab", "--max-seq-len", 64, *RUN)
    pair = [started(words, cache) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], results
    assert sum("building target for cpu" in err for _, err in results) == 1
    assert sum("another process is building target" in err for _, err in results) == 1
    ids = [json.loads(out)["output_ids"] for out, _ in results]
    assert ids[0] == ids[1]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_an_interrupted_build_leaves_no_engine(cache: Path, text_target: Path) -> None:
    process = started(("run", text_target, "ab", *RUN), cache)
    assert process.stderr is not None
    # The export that follows takes seconds.
    while "reading checkpoints" not in (line := process.stderr.readline()):
        assert line, process.wait()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(cache.iterdir())


def test_rejects_build_options_for_an_engine(command: Command, tiny_engine: Path) -> None:
    for option in ("--max-seq-len", "--kv-pages"):
        result = command("run", tiny_engine, "ab", option, 64)
        assert result.refused("is an engine", f"{option} is an option of a build")
    result = command("run", tiny_engine, "ab", "--revision", "main")
    assert result.refused("--revision is an option of a build")


def test_reports_errors_before_a_build(command: Command, cache: Path, text_target: Path) -> None:
    assert command("run", text_target, "a", "--temperature", -1).code == 2
    assert command("run", text_target, "a", "--revision", "main").refused("--revision is for")
    twice = command("run", text_target, "a", "--prompt", "b")
    assert twice.refused("the prompt was given twice")
    assert not cache.exists()


def test_inspect_of_a_checkpoint(command: Command, text_target: Path) -> None:
    result = command("inspect", text_target, "--gpu", "h100", "--json")
    (report,) = result.records
    files = [f for f in text_target.iterdir() if f.suffix in (".safetensors", ".json", ".jinja")]
    assert report["file_bytes"] == sum(file.stat().st_size for file in files)
    assert report["has_tokenizer"] is True
    answers = {answer["backend"]: answer for answer in report["backends"]}
    assert set(answers) == {"cpu", "cuda", "tensorrt", "tensorrt-rtx"}
    assert answers["cpu"]["reason"] is None
    assert answers["cpu"]["weights_bytes"] >= answers["cuda"]["weights_bytes"]
    tokens = [entry["tokens"] for entry in report["capacity"]]
    assert tokens == sorted(tokens)
    assert report["gpu_bytes"] == 81559 << 20
    table = command("inspect", text_target).out
    assert "checkpoint" in table and "can be built for" in table
    assert command("inspect", text_target, "--gpu", "a100").refused("expected h100 or h200")


def test_inspect_counts_mxfp4_experts_as_fp32_on_a_cpu(command: Command) -> None:
    model = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss" / "target"
    (report,) = command("inspect", model, "--json").records
    answers = {answer["backend"]: answer["weights_bytes"] for answer in report["backends"]}
    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(config)
    assert answers["cpu"] == 4 * sum(parameter.numel() for parameter in plain.parameters())
    assert answers["cuda"] < answers["cpu"] / 2


def test_inspect_of_a_gguf_file_that_cannot_be_built(command: Command, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "mamba", {}, {})
    assert command("inspect", file).refused("model.gguf", "mamba")


def test_inspect_of_an_engine_rejects_gpu(command: Command, tiny_engine: Path) -> None:
    assert command("inspect", tiny_engine, "--gpu", "h100").refused("are for checkpoints")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-batch-size", 10**20), "--max-batch-size is 1"),
        (("--max-seq-len", 10**20), "--max-seq-len is 1"),
        (("--max-seq-len", 4097), "--max-seq-len 4097 exceeds the model's"),
        (("--anatomy",), "is no engine: --anatomy shows the steps of CUDA engines"),
    ],
)
def test_inspect_rejects_limits_that_no_build_supports(
    command: Command, text_target: Path, options: tuple[object, ...], message: str
) -> None:
    result = command("inspect", text_target, *options)
    assert result.code == 2
    assert message in result.err
