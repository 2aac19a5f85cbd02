"""``specbuild run``: output, JSON, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Command
from process_time import least_cost

COUNT = {"type": "integer", "minimum": 0}
SECONDS = {"type": "number", "minimum": 0}
IDS = {"type": "array", "items": COUNT}
STATS_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "prompt_tokens": COUNT,
        "output_tokens": COUNT,
        "steps": COUNT,
        "mean_acceptance_length": {"type": "number", "minimum": 1},
        "acceptance_histogram": IDS,
        "acceptance_per_position": {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "ttft_s": SECONDS,
        "tpot_s": {"anyOf": [SECONDS, {"type": "null"}]},
        "output_tokens_per_s": SECONDS,
        "preemptions": COUNT,
        "paused_steps": COUNT,
        "cached_tokens": COUNT,
        "proposed_tokens": COUNT,
    },
}
STATS_SCHEMA["required"] = list(STATS_SCHEMA["properties"])
RECORD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "prompt_ids": IDS,
        "output_ids": IDS,
        "text": {"type": ["string", "null"]},
        "finish_reason": {"enum": ["length", "eos", "stop"]},
        "stats": STATS_SCHEMA,
    },
}
RECORD_SCHEMA["required"] = list(RECORD_SCHEMA["properties"])
LOGPROBS = {"type": "array", "items": {"type": "number", "maximum": 0}}
LOGPROB_SCHEMA = RECORD_SCHEMA | {
    "properties": RECORD_SCHEMA["properties"] | {"logprobs": LOGPROBS},
    "required": [*RECORD_SCHEMA["required"], "logprobs"],
}


def prompts_file(folder: Path, *prompts: dict[str, Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def ids_prompt(name: str, length: int = 5) -> dict[str, Any]:
    return {"id": name, "prompt_ids": [(7 * i + len(name) * 13) % 250 + 3 for i in range(length)]}


def output_ids(command: Command, engine: Path, *arguments: object) -> list[int]:
    result = command("run", engine, "--json", "--ignore-eos", *arguments)
    assert result.code == 0, result.err
    ids: list[int] = result.records[0]["output_ids"]
    return ids


def test_json_lines_match_the_schema_in_input_order(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    names = ["first", "second", "third", "fourth", "fifth"]
    prompts = [ids_prompt(name, 30 if name == "first" else 3) for name in names]
    file = prompts_file(tmp_path, *prompts)
    result = command("run", tiny_engine, "--prompts", file, "--json", "--max-new-tokens", 9)
    assert result.code == 0, result.err
    assert [record["id"] for record in result.records] == names
    for record, prompt in zip(result.records, prompts, strict=True):
        jsonschema.validate(record, RECORD_SCHEMA)
        stats = record["stats"]
        assert record["prompt_ids"] == prompt["prompt_ids"]
        assert stats["prompt_tokens"] == len(prompt["prompt_ids"])
        assert stats["output_tokens"] == len(record["output_ids"]) <= 9
        assert sum(stats["acceptance_histogram"]) == stats["steps"]


def test_logprobs_are_output_if_requested(command: Command, tiny_engine: Path) -> None:
    arguments = ("--prompt", "abc", "--json", "--logprobs", "--max-new-tokens", 6)
    (record,) = command("run", tiny_engine, *arguments).records
    jsonschema.validate(record, LOGPROB_SCHEMA)
    assert len(record["logprobs"]) == len(record["output_ids"])


def test_logit_options_equal_fields_of_a_line(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    own = {"min_p": 0.05, "frequency_penalty": 0.8, "repetition_penalty": 1.2, "min_tokens": 3}
    own |= {"presence_penalty": 0.3, "top_logprobs": 2, "temperature": 1.0, "max_new_tokens": 8}
    options = [part for n, v in own.items() for part in (f"--{n.replace('_', '-')}", v)]
    alone = command("run", tiny_engine, "--prompt", "hi", "--json", *options)
    assert alone.code == 0, alone.err
    biased = {"id": "b", "prompt": "hi", "logit_bias": {"7": 100}}
    file = prompts_file(tmp_path, {"id": "0", "prompt": "hi"} | own, biased)
    (record,), lines = alone.records, command("run", tiny_engine, "--prompts", file, "--json")
    assert lines.code == 0, lines.err
    assert lines.records[0]["output_ids"] == record["output_ids"]
    assert lines.records[0]["top_logprobs"] == record["top_logprobs"]
    assert [len(best) for best in record["top_logprobs"]] == [2] * len(record["output_ids"])
    assert set(lines.records[1]["output_ids"]) == {7} and "top_logprobs" not in lines.records[1]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_draft_shape_does_not_change_tokens(
    command: Command, tiny_engine: Path, temperature: int
) -> None:
    base = ("--prompt", "hello", "--temperature", temperature, "--seed", 5)
    base = (*base, "--max-new-tokens", 24)
    shapes: list[tuple[object, ...]] = [
        (),
        ("--draft-top-k", 1, "--draft-depth", 3),
        ("--draft-top-k", 4, "--draft-depth", 4, "--draft-tokens", 12),
        ("--draft-depth", 1),
        ("--draft-tokens", 2),
    ]
    plain = output_ids(command, tiny_engine, *base, "--no-spec")
    assert len(plain) == 24
    for shape in shapes:
        assert output_ids(command, tiny_engine, *base, *shape) == plain


def test_a_line_overrides_the_parameters(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    text = {"id": "t", "prompt": "hi", "max_new_tokens": 5}
    chat = {"id": "m", "messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 7}
    hot = {"id": "h", "prompt": "hi", "temperature": 1.0, "seed": 9, "raw": True}
    file = prompts_file(tmp_path, text, chat, hot)
    done = command("run", tiny_engine, "--prompts", file, "--json", "--ignore-eos")
    assert done.code == 0, done.err
    first, second, third = done.records
    assert second["prompt_ids"] == first["prompt_ids"] != third["prompt_ids"]
    assert [len(r["output_ids"]) for r in done.records[:2]] == [5, 7]
    sampled = ("--prompt", "hi", "--temperature", 1, "--seed", 9, "--raw")
    assert third["output_ids"] == output_ids(command, tiny_engine, *sampled)


def test_line_i_uses_seed_plus_i(command: Command, tiny_engine: Path, tmp_path: Path) -> None:
    same = [ids_prompt("a") | {"id": str(i)} for i in range(3)]
    file = prompts_file(tmp_path, *same)
    arguments = ("--json", "--ignore-eos", "--temperature", 1, "--max-new-tokens", 12)
    together = command("run", tiny_engine, "--prompts", file, "--seed", 40, *arguments).records
    alone = prompts_file(tmp_path, same[0])
    for i, record in enumerate(together):
        arguments_i = ("--prompts", alone, "--seed", 40 + i, *arguments)
        (single,) = command("run", tiny_engine, *arguments_i).records
        assert single["output_ids"] == record["output_ids"]
    assert len({tuple(record["output_ids"]) for record in together}) == 3


def test_text_streams_to_standard_output_and_statistics_to_standard_error(
    command: Command, tiny_engine: Path
) -> None:
    arguments = ("--prompt", "hello", "--max-new-tokens", 12)
    (record,) = command("run", tiny_engine, *arguments, "--json").records
    result = command("run", tiny_engine, *arguments)
    assert result.code == 0
    assert result.out == record["text"] + "\n"
    assert "statistics" in result.err
    assert "draft: " in result.err


def test_standard_input_is_the_prompt(command: Command, tiny_engine: Path) -> None:
    arguments = ("--json", "--max-new-tokens", 4)
    (from_stdin,) = command("run", tiny_engine, *arguments, stdin=b"hello\n").records
    (from_option,) = command("run", tiny_engine, *arguments, "--prompt", "hello").records
    assert from_stdin["prompt_ids"] == from_option["prompt_ids"]
    assert from_stdin["output_ids"] == from_option["output_ids"]


def test_text_uses_the_chat_template_unless_raw(command: Command, tiny_engine: Path) -> None:
    arguments = ("run", tiny_engine, "--json", "--max-new-tokens", 1, "--prompt")
    (templated,) = command(*arguments, "hello").records
    (raw,) = command(*arguments, "hello", "--raw").records
    (by_hand,) = command(*arguments, "<user>hello", "--raw").records
    assert len(templated["prompt_ids"]) > len(raw["prompt_ids"])
    assert templated["prompt_ids"] == by_hand["prompt_ids"]


def test_an_engine_without_a_tokenizer_prints_ids(
    command: Command, ids_engine: Path, tmp_path: Path
) -> None:
    file = prompts_file(tmp_path, ids_prompt("a"))
    arguments = ("--prompts", file, "--max-new-tokens", 5, "--ignore-eos")
    (record,) = command("run", ids_engine, *arguments, "--json").records
    assert record["text"] is None
    jsonschema.validate(record, RECORD_SCHEMA)
    streamed = command("run", ids_engine, *arguments).out
    assert [int(word) for word in streamed.split()] == record["output_ids"]


def test_output_stops_at_max_seq_len(command: Command, tiny_engine: Path, tmp_path: Path) -> None:
    file = prompts_file(tmp_path, ids_prompt("a", 90))
    arguments = ("--prompts", file, "--json", "--ignore-eos", "--max-new-tokens", 50)
    (record,) = command("run", tiny_engine, *arguments).records
    assert len(record["output_ids"]) == 6
    assert record["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--prompt", ""), ("prompt is empty",)),
        (("--draft-top-k", 5), ("--draft-top-k 5", "(4)")),
        (("--draft-depth", 5), ("--draft-depth 5", "(4)")),
        (("--draft-tokens", 13), ("--draft-tokens 13", "(12)")),
        (("--draft-tokens", 12, "--draft-top-k", 1, "--draft-depth", 2), ("12", "2 nodes")),
        (("--no-spec", "--draft-top-k", 1), ("--no-spec",)),
        (("--exact", "--draft-top-k", 1), ("--exact decodes without a draft",)),
        (("--exact", "--specpv-retrieval-blocks", "auto"), ("and without lossy modes",)),
        (("--exact", "--dsa-top-k", 2), ("leave the --draft, --specpv and --dsa options out",)),
        (("--top-p", 0), ("top_p",)),
        (("--top-p", "nan"), ("top_p",)),
        (("--temperature", "inf"), ("temperature",)),
        (("--seed", 2**64), ("seed",)),
        (("--stop", ""), ("stop",)),
        (("--logprobs",), ("--json",)),
        (("--top-logprobs", 2), ("--top-logprobs", "--json")),
        (("--min-p", 2), ("--min-p", "less than or equal to 1")),
        (("--repetition-penalty", 0), ("repetition_penalty",)),
        (("--min-tokens", 129), ("min_tokens",)),
        (("--max-new-tokens", 0), ("--max-new-tokens",)),
        (("--threads", 0), ("--threads",)),
        (("--threads", 100_000), ("threads is 100000",)),
        (("--temperature", "1e-40"), ("temperature",)),
        (("--prompt", "\udcff"), ("Unicode",)),
        (("--stop", "\udcff"), ("Unicode",)),
        (("--prompts", "missing.jsonl"), ("missing.jsonl",)),
    ],
)
def test_rejects_invalid_options(
    command: Command,
    tiny_engine: Path,
    arguments: tuple[object, ...],
    messages: tuple[str, ...],
) -> None:
    prompt = () if {"--prompt", "--prompts"} & set(arguments) else ("--prompt", "x")
    assert command("run", tiny_engine, *prompt, *arguments).refused(*messages)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ({"id": "b", "prompt_ids": [272]}, ("272", "vocabulary")),
        ({"id": "b", "prompt_ids": [-1]}, ("-1", "vocabulary")),
        ({"id": "b", "prompt_ids": [3] * 96}, ("96", "max_seq_len")),
        ({"id": "b", "prompt_ids": []}, ("empty",)),
        ({"id": "b", "prompt": "\ud800"}, ("surrogate",)),
        ({"id": "b", "prompt_ids": [1], "sed": 2}, ("has no 'sed'", "did you mean seed?")),
        ({"id": "b", "prompt_ids": [1], "logit_bias": {"x": 2}}, ("logit_bias",)),
        ({"id": "b", "prompt_ids": [1], "logit_bias": {"7": 101}}, ("logit_bias of token 7",)),
    ],
)
def test_an_invalid_line_is_named_before_any_output(
    command: Command,
    tiny_engine: Path,
    tmp_path: Path,
    prompt: dict[str, Any],
    messages: tuple[str, ...],
) -> None:
    file = prompts_file(tmp_path, ids_prompt("a"), prompt, ids_prompt("c"))
    assert command("run", tiny_engine, "--prompts", file, "--json").refused("line 2", *messages)


def test_text_needs_a_tokenizer(command: Command, ids_engine: Path) -> None:
    assert command("run", ids_engine, "--prompt", "x").refused("no tokenizer")


def test_draft_options_need_a_draft(command: Command, ids_engine: Path, tmp_path: Path) -> None:
    file = prompts_file(tmp_path, ids_prompt("a"))
    assert command("run", ids_engine, "--prompts", file, "--draft-top-k", 1).refused("no draft")


@pytest.mark.speed
def test_start_up_takes_little_longer_than_importing_the_libraries(
    tiny_engine: Path, tmp_path: Path
) -> None:
    """Measure from the start of the process to its end; the cost table exists already."""
    line = [sys.executable, "-m", "specbuild.cli.main", "run", str(tiny_engine)]
    line += ["--prompt", "hello", "--max-new-tokens", "8", "--ignore-eos"]
    environment = {"SPECBUILD_CACHE_DIR": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"}
    cost = least_cost(line, environment=environment)
    assert cost.ratio < 4.6, cost


@pytest.mark.parametrize("command_line", [("inspect",), ("run", "--prompt", "x")])
def test_output_without_unicode_replaces_characters(
    tiny_engine: Path, command_line: tuple[str, ...]
) -> None:
    name, *rest = command_line
    line = [sys.executable, "-m", "specbuild.cli.main", name, str(tiny_engine), *rest]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, capture_output=True, timeout=300, env=environment, check=False)
    assert (done.returncode, done.stdout.isascii()) == (0, True), done.stderr


def test_a_closed_standard_output_is_reported_in_one_line(tiny_engine: Path) -> None:
    script = f"exec {sys.executable} -m specbuild.cli.main run {tiny_engine} --prompt x >&-"
    done = subprocess.run(["sh", "-c", script], capture_output=True, timeout=300, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_run_imports_no_heavy_package(tiny_engine: Path) -> None:
    script = f"""
import sys
from specbuild.cli.main import main
assert main(["run", {str(tiny_engine)!r}, "--prompt", "hi", "--json", "--max-new-tokens", "4"]) == 0
heavy = {{"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "specbuild.plugins_cuda"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
built = {{name for name in sys.modules if name.startswith("specbuild.builder.")}}
light = ("kernel_options", "option", "speculative_config", "suffix_options", "tensorrt_options",
         "yaml_file")
assert all(name.removeprefix("specbuild.builder.").startswith(light) for name in built), built
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=300)


def test_warns_if_the_context_truncates_an_output(command: Command, tiny_engine: Path) -> None:
    """The limit of the engine is 96 tokens."""
    cut = command("run", tiny_engine, "ab", "--json", "--max-new-tokens", 200, "--raw")
    (record,) = cut.records
    left = 96 - len(record["prompt_ids"])
    assert f"--max-new-tokens 200 exceeds the context: prompt 0 leaves {left} tokens" in cut.err
    fits = command("run", tiny_engine, "ab", "--json", "--max-new-tokens", left, "--raw")
    assert "exceeds the context" not in fits.err
