"""Every command except ``run``: its output, as text and as JSON, and its exit codes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Command
from process_time import least_cost

from specbuild.builder.engine.rewrite import rewrite_engine
from specbuild.builder.verify.report import LosslessRow, VerifyReport, VerifyRow
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.strict_json import to_json

# The sizes of an engine that other tests use too, so that its graphs are exported once.
TINY = ("--max-seq-len", 96, "--max-batch-size", 2, "--draft-top-k", 4, "--draft-depth", 4,
        "--draft-tokens", 12)  # fmt: skip
NUMBER = {"type": "number"}
BENCH_SCHEMA = {
    "type": "object",
    "required": ["max_new_tokens", "rounds", "draft", "ratio", "sets"],
    "properties": {
        "ratio": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "draft": {"type": "string"},
        "sets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "ratio", "mean_acceptance_length", "pairs", "same_output"],
                "properties": {
                    "without_draft_tokens_per_s": NUMBER,
                    "acceptance_histogram": {"type": "array", "items": {"type": "integer"}},
                    "pairs": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["id", "with_draft", "without_draft", "ratio"],
                        },
                    },
                },
            },
        },
    },
}


def test_inspect_json_has_the_manifest_and_the_memory(command: Command, tiny_engine: Path) -> None:
    result = command("inspect", tiny_engine, "--json")
    assert result.code == 0
    (facts,) = result.records
    memory = facts.pop("predicted_memory")
    digest = hashlib.sha256((tiny_engine / "manifest.json").read_bytes()).hexdigest()
    assert facts.pop("manifest_sha256") == digest
    assert facts.pop("cache_capacity")["sequences"]
    assert facts == json.loads(json.dumps(to_json(read_manifest(tiny_engine))))
    weights = (tiny_engine / "weights.safetensors").stat().st_size
    assert memory["weights_bytes"] == weights
    assert memory["total_bytes"] > weights
    assert (memory["max_batch_size"], memory["max_seq_len"]) == (2, 96)


def test_inspect_predicts_memory_for_other_limits(command: Command, tiny_engine: Path) -> None:
    def cache_bytes(*arguments: object) -> dict[str, int]:
        (facts,) = command("inspect", tiny_engine, "--json", *arguments).records
        sizes: dict[str, int] = facts["predicted_memory"]["kv_bytes"]
        return sizes

    own, wide = cache_bytes(), cache_bytes("--max-batch-size", 8)
    long = cache_bytes("--max-seq-len", 512)
    assert set(own) == {"full", "sliding", "draft"}
    assert all(3 * own[group] < wide[group] < 4 * own[group] + 1 for group in own)
    assert long["full"] > 4 * own["full"]
    assert long["sliding"] < 3 * own["sliding"]
    beyond = command("inspect", tiny_engine, "--max-seq-len", 4096)
    assert beyond.refused("512")


def test_inspect_shows_tables(command: Command, tiny_engine: Path) -> None:
    result = command("inspect", tiny_engine)
    assert result.code == 0
    for part in ("gpt_oss", "96 tokens", "top-k 4, depth 4, 12 tokens", "weights.safetensors"):
        assert part in result.out
    assert not result.err


def test_inspect_lists_what_the_build_omitted(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    report = json.loads((engine / "build_report.json").read_bytes())
    assert report["refused"] == []
    report["refused"] = [{"reason": "prompt chunks of 2048 rows: no kernel"}]
    report["cuda"] = {"left_out": [{"reason": "these spill"}]}
    rewrite_engine(engine, {"build_report.json": json.dumps(report).encode()})
    (facts,) = command("inspect", engine, "--json").records
    assert facts["refused_kernels"] == ["prompt chunks of 2048 rows: no kernel", "these spill"]
    assert "these spill" in command("inspect", engine).out
    rewrite_engine(engine, {"build_report.json": b"[]"})
    result = command("inspect", engine)
    assert result.code == 2 and "build_report.json is no build report" in result.err


def test_check_accepts_a_supported_engine(command: Command, tiny_engine: Path) -> None:
    result = command("check", tiny_engine)
    assert (result.code, result.err) == (0, "")
    assert "can run on this machine" in result.out


def test_check_lists_every_problem(
    command: Command, tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specbuild.runtime.executors.registry.check_here",
        lambda _manifest, _directory: ["no library", "no memory"],
    )
    result = command("check", tiny_engine)
    assert result.code == 1
    assert "- no library\n- no memory\n" in result.out


@pytest.mark.speed
def test_check_is_fast(tiny_engine: Path) -> None:
    line = [sys.executable, "-m", "specbuild.cli.main", "check", str(tiny_engine)]
    cost = least_cost(line)
    assert cost.ratio < 1.75, cost


def test_doctor_exits_with_0(command: Command) -> None:
    result = command("doctor")
    assert result.code == 0
    for part in ("Python", "onnxruntime", "torch", "can build CPU engines", "can run CPU"):
        assert part in result.out


def test_doctor_reports_missing_packages(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbuild.cli.terminal.machine.package_version", lambda _package: None)
    out = command("doctor").out
    assert "can run CPU engines: no: onnxruntime missing; run pip install '.[cpu]'" in out
    assert "can build CPU engines: no: torch, " in out


def test_bench_json(command: Command, tiny_engine: Path, tmp_path: Path) -> None:
    sets = []
    for name in ("short", "long"):
        file = tmp_path / f"{name}.jsonl"
        ids = list(range(3, 8 if name == "short" else 40))
        lines = [{"id": str(i), "prompt_ids": [*ids, i + 3]} for i in range(2)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sets += ["--prompts", file]
    picture = tmp_path / "speed.svg"
    arguments = ("--max-new-tokens", 8, "--rounds", 2, "--plot", picture)
    result = command("bench", "pairs", tiny_engine, *sets, *arguments, "--json")
    assert result.code == 0, result.err
    (report,) = result.records
    jsonschema.validate(report, BENCH_SCHEMA)
    assert [entry["name"] for entry in report["sets"]] == ["short", "long"]
    for entry in report["sets"]:
        assert len(entry["pairs"]) == 4
        assert entry["same_output"] == 4
        assert all(pair["output_tokens"] == 8 for pair in entry["pairs"])
    svg = picture.read_text()
    assert svg.startswith("<?xml")
    # matplotlib writes each drawn text into a comment.
    written = set(re.findall(r"<!-- (.*?) -->", svg))
    assert {"short", "long", "2 prompts", "without draft", "with draft"} <= written
    for entry in report["sets"]:
        assert f"{entry['without_draft_tokens_per_s']:.0f}" in written
        assert {f"{entry['with_draft_tokens_per_s']:.0f}", f"{entry['ratio']:.2f}×"} <= written
    # Without a background and black text, the chart is readable on light and dark pages.
    assert not re.search(r"fill: ?(#ffffff|#000000)|stroke: ?#000000", svg)


def test_a_chart_of_one_prompt_set_omits_the_file_name(
    command: Command, tiny_engine: Path, tmp_path: Path
) -> None:
    prompts, picture = tmp_path / "some_file.jsonl", tmp_path / "speed.svg"
    prompts.write_text('{"prompt_ids": [3, 4, 5]}\n')
    arguments = ("--prompts", prompts, "--max-new-tokens", 4, "--rounds", 1, "--plot", picture)
    assert command("bench", "pairs", tiny_engine, *arguments).code == 0
    written = re.findall(r"<!-- (.*?) -->", picture.read_text())
    assert "1 prompt" in written and not any("some" in text for text in written)


def test_bench_prints_a_table_for_random_prompts(command: Command, tiny_engine: Path) -> None:
    arguments = ("--max-new-tokens", 4, "--rounds", 1, "--draft-top-k", 1, "--draft-depth", 2)
    result = command("bench", "pairs", tiny_engine, *arguments)
    assert result.code == 0, result.err
    for part in ("random tokens", "ratio", "tokens/step", "top-k 1, depth 2, 2 tokens"):
        assert part in result.out


@pytest.mark.parametrize(("built", "arguments"), [("ids", ()), ("tiny", ("--no-spec",))])
def test_bench_without_a_draft_measures_plain_decoding(
    command: Command, request: pytest.FixtureRequest, built: str, arguments: tuple[str, ...]
) -> None:
    engine = request.getfixturevalue(f"{built}_engine")
    short = ("--max-new-tokens", 4, "--rounds", 1, "--json")
    result = command("bench", "pairs", engine, *short, *arguments)
    (report,) = result.records
    jsonschema.validate(report, BENCH_SCHEMA)
    assert report["ratio"] is None
    assert report["sets"][0]["without_draft_tokens_per_s"] > 0


def test_verify_passes_on_a_correct_engine(
    command: Command, tiny_engine: Path, text_target: Path, text_draft: Path
) -> None:
    result = command("verify", tiny_engine, "--model", text_target, "--draft", text_draft, "--json")
    assert result.code == 0, result.err
    (report,) = result.records
    assert report["passed"]
    stages = {row["stage"] for row in report["rows"]}
    assert {"target logits", "draft logits"} <= stages
    assert all(row["differences"] == 0 for row in report["losslessness"])


def test_verify_exits_with_1_when_a_threshold_fails(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = VerifyRow("logits", 8, 0.5, 2e-1, 0.25, 0.5, "argmax equal", False)
    lossless = LosslessRow("greedy", 6, 288, 0, 0, True)

    def report(*_arguments: Any) -> VerifyReport:
        return VerifyReport((row,), (lossless,), False)

    monkeypatch.setattr("specbuild.builder.verify.verify_engine", report)
    result = command("verify", "engine", "--model", "target")
    assert result.code == 1
    assert "a threshold was missed" in result.out
    assert command("verify", "engine", "--model", "target", "--json").code == 1


def test_build_writes_an_engine_and_reports_it(
    command: Command, text_target: Path, text_draft: Path, tmp_path: Path
) -> None:
    output, passes, onnx_dir = tmp_path / "engine", tmp_path / "passes", tmp_path / "onnx"
    arguments = ("--model", text_target, "--draft", text_draft, "--output", output, *TINY)
    result = command("build", *arguments, "--keep-onnx", onnx_dir, "--dump-passes", passes)
    assert result.code == 0, result.err
    assert not result.out
    assert "96 tokens" in result.err
    assert list(onnx_dir.glob("*.onnx"))
    assert f"{onnx_dir}: the portable graphs" in result.err
    stages = re.findall(r"^[a-z ]+: ([\d.]+) (\w+)$", result.err, re.MULTILINE)
    assert {"graphs", "KiB"} <= {unit for _, unit in stages}
    assert all(float(amount) > 0 for amount, _ in stages)
    warnings = [line for line in result.err.splitlines() if line.startswith("warning: ")]
    assert warnings and len(set(warnings)) == len(warnings)
    assert list(passes.rglob("*.onnx"))
    assert read_manifest(output).limits.max_seq_len == 96
    assert command("build", *arguments).refused("engine", "--force")


def test_train_draft_writes_a_draft_that_builds(
    command: Command, text_target: Path, tmp_path: Path
) -> None:
    text, output = tmp_path / "text", tmp_path / "draft"
    text.mkdir()
    for i in range(8):
        lines = [f"line {j} of text {i}: a small sentence to learn from\n" for j in range(60)]
        (text / f"{i}.txt").write_text("".join(lines))
    sizes = ("--steps", 2, "--batch-size", 2, "--sequence-length", 32, "--ttt-steps", 2)
    model = ("--model", text_target)
    result = command("train", "draft", *model, "--text", text, "--output", output, *sizes)
    assert result.code == 0, result.err
    assert not result.out
    built = command("build", *model, "--draft", output, "--output", tmp_path / "engine", *TINY)
    assert built.code == 0, built.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "missing"), "missing"),
        (("--text", ".", "--taps", "1;2"), "--taps"),
        (("--text", ".", "--learning-rate", "0"), "learning_rate"),
    ],
)
def test_train_draft_rejects_invalid_options(
    command: Command, text_target: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    base = ("train", "draft", "--model", text_target, "--output", tmp_path / "draft")
    assert command(*base, *arguments).refused(message)
    assert not (tmp_path / "draft").exists()


def test_signing_checking_and_pinning(command: Command, tiny_engine: Path, tmp_path: Path) -> None:
    """Create the keys by the commands in the documentation."""
    engine, private, public = tmp_path / "engine", tmp_path / "key.pem", tmp_path / "key.pub.pem"
    shutil.copytree(tiny_engine, engine)
    for line in (
        ["genpkey", "-algorithm", "ed25519", "-out", private],
        ["pkey", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run(["openssl", *map(str, line)], check=True)
    unsigned = command("check", engine, "--verify-key", public)
    assert unsigned.code == 2 and "has no signature that can be read" in unsigned.err
    signed = command("sign", engine, "--key", private)
    assert (signed.code, signed.err) == (0, "")
    checked = command("check", engine, "--verify-key", public)
    assert checked.code == 0
    digest = checked.out.split()[-1]
    prompt = ["--prompt", "a", "--raw", "--max-new-tokens", "1", "--json"]
    assert command("run", engine, *prompt, "--verify-key", public, "--pin", digest).code == 0
    (facts,) = command("inspect", engine, "--json").records
    assert facts["manifest_sha256"] == digest
    pinned = command("run", engine, *prompt, "--pin", "0" * 64)
    assert pinned.code == 2 and "is not the engine that is pinned" in pinned.err
    rewrite_engine(engine, {"build_report.json": b"{}"})
    assert "has no signature" in command("check", engine, "--verify-key", public).err
