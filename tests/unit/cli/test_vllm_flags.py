"""Command lines of vllm serve from its documentation and recipes."""

from __future__ import annotations

import pytest

from specbuild.cli.options.vllm_flags import ALWAYS_ON, IGNORED, REFUSED, serve_words
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        (
            "openai/gpt-oss-20b --max-model-len 8192 --max-num-seqs=16 --tensor-parallel-size 1",
            "openai/gpt-oss-20b --max-seq-len 8192 --max-batch-size 16",
        ),
        ("--model m --port 80", "m --port 80"),
        ("m --served-model-name a b --port 80",
         "m --served-model-name a --served-model-name b --port 80"),
        ("--api-key k engine", "--api-key k engine"),
        ("m --api-key k1 k2", "m --api-key k1 --api-key k2"),
        ("m --max_model_len 64 -tp 1", "m --max-seq-len 64"),
        ("m -tp 2 --port 80", "m --tensor-parallel 2 --port 80"),
        ("m --tensor-parallel-size=4", "m --tensor-parallel 4"),
        ("m -q fp8 --kv-cache-dtype fp8_e4m3", "m --weights-dtype fp8 --kv-dtype fp8"),
        ("m --kv-cache-dtype auto", "m"),
        ("m --no-enable-prefix-caching", "m --no-prefix-cache"),
        ("m --generation-config vllm", "m --generation-config none"),
        ("m --generation-config auto", "m --generation-config auto"),
        ('m --allowed-origins ["http://a"]', "m --cors http://a"),
        ("m --chat-template t.jinja --tool-call-parser llama3_json",
         "m --chat-template t.jinja --tool-call-parser llama3_json"),
        ("m --enable-auto-tool-choice --enforce-eager --dtype bfloat16 --port 1", "m --port 1"),
        ("engine --draft-top-k 2", "engine --draft-top-k 2"),
        ("m --no-async-scheduling --no-enable-lora --no-enable-log-outputs --port 1", "m --port 1"),
        ("m --structured-outputs-config.backend xgrammar --port 1", "m --port 1"),
        ("m --max-num-queued-reqs 7 --enable-force-include-usage",
         "m --max-queue 7 --enable-force-include-usage"),
    ],
)  # fmt: skip
def test_command_lines_are_translated(line: str, expected: str) -> None:
    assert serve_words(line.split())[0] == expected.split()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            '{"method":"eagle3","model":"d","num_speculative_tokens":3}',
            "--draft d --draft-tokens 3",
        ),
        ('{"model":"d"}', "--draft d"),
        ('{"method":"mtp","num_speculative_tokens":1}', "--draft mtp --draft-tokens 1"),
        ('{"method":"suffix"}', "--drafter suffix"),
    ],
)
def test_speculation_is_determined_by_the_build(config: str, expected: str) -> None:
    words, _ = serve_words(["m", "--speculative-config", config])
    assert words == ["m", *expected.split()]


def test_prints_a_line_for_each_flag_without_effect() -> None:
    for flag in ALWAYS_ON:
        words, (note,) = serve_words(["m", flag, "--port", "1"])
        assert words == ["m", "--port", "1"]
        assert note.startswith(f"{flag}: always on here")
    for flag, (count, _) in IGNORED.items():
        words, (note,) = serve_words(["m", flag, *["0.9"] * count, "--port", "1"])
        assert words == ["m", "--port", "1"]
        assert note.startswith(f"{flag}: no effect here")


@pytest.mark.parametrize(
    "words",
    [
        *(["m", flag, *["x"] * count] for flag, (count, _) in REFUSED.items()),
        ["m", "--pipeline-parallel-size", "2"],
        ["m", "--data-parallel-size", "2"],
        ["m", "--quantization", "awq"],
        ["m", "--speculative-config", '{"method":"medusa","model":"d"}'],
        ["m", "--speculative-config", "x"],
        ["m", "--speculative-config.method", "mtp"],
        ["m", "--allowed-origins", "x"],
        ["m", "--max-model-len"],
    ],
)
def test_rejects_flags_that_would_change_the_service(words: list[str]) -> None:
    with pytest.raises(SpecbuildError, match=words[1]):
        serve_words(words)
