"""The prompts file is read and checked completely before anything runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.cli.terminal import prompt_file
from specbuild.cli.terminal.prompt_file import read_prompt_file, read_prompts, tokenised
from specbuild.cli.terminal.prompt_line import guide_of
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

GOOD = b'{"id": "a", "prompt_ids": [1, 2]}\n'


def write(folder: Path, data: bytes) -> Path:
    file = folder / "prompts.jsonl"
    file.write_bytes(data)
    return file


def test_reads_ids_and_text(tmp_path: Path) -> None:
    text = '{"id": "b", "prompt": "naïve"}'.encode()
    first, second = read_prompt_file(write(tmp_path, GOOD + text))
    assert first.prompt.prompt_ids == (1, 2)
    assert second.prompt.prompt == "naïve"
    assert second.place.endswith("prompts.jsonl line 2")


def test_the_default_id_is_the_line_number(tmp_path: Path) -> None:
    lines = b'{"prompt": "x"}\n{"id": "b", "prompt": "y"}\n{"prompt": "z", "id": null}\n'
    prompts = read_prompt_file(write(tmp_path, lines))
    assert [item.prompt.id for item in prompts] == ["1", "b", "3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"[1]", "expected an object"),
        (b'{"id": "a"}', "neither prompt nor prompt_ids"),
        (b'{"id": "a", "prompt": "x", "prompt_ids": [1]}', "both"),
        (b'{"id": 1, "prompt": "x"}', "expected str"),
        (b'{"id": "a", "prompt_ids": [1.5]}', "expected int"),
        (b'{"id": "a", "prompt_ids": [true]}', "expected int"),
        (b'{"id": "a", "prompt_ids": [NaN]}', "NaN"),
        (b'{"id": "a", "prompt_ids": "12"}', "expected a list"),
        (b'{"id": "a", "prompt_ids": []}', "empty"),
        (b'{"id": "a", "prompt": ""}', "empty"),
        (b'{"id": "a", "prompt": "x", "sed": 3}', "has no 'sed'; did you mean seed?"),
        (b'{"id": "a", "text": "x"}', "has no 'text'; did you mean prompt?"),
        (b'{"id": "a", "prompt": "x", "max_tokens": 3}', "did you mean max_new_tokens?"),
        (b'{"id": "a", "prompt": "x", "prompt": "y"}', "twice"),
        (b'{"id": "a", "prompt": "x", "messages": [{"role": "user"}]}', "both prompt and messages"),
        (b'{"id": "a", "messages": []}', "give at least one message"),
        (b'{"id": "a", "messages": [{"content": "x"}]}', "messages[0] must be like"),
        (b'{"id": "a", "prompt": "x", "temperature": "hot"}', "expected float"),
        (b'{"id": "a", "prompt": "x", "stop": "end"}', "expected a list"),
        (b'{"id": "a", "prompt": "x", "specpv_retrieval_blocks": true}', "number or 'auto'"),
        (b'{"id": "a", "prompt": "x", "guide": {"xml": "y"}}', "of the kind 'xml'"),
        (b'{"id": "a", "prompt": "x", "guide": {}}', "one key"),
        (b'{"id": "a", "prompt": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "line 3"),
    ],
)
def test_the_error_names_an_invalid_line(tmp_path: Path, line: bytes, message: str) -> None:
    file = write(tmp_path, GOOD + GOOD + line + b"\n" + GOOD)
    with pytest.raises(SpecbuildError) as caught:
        read_prompt_file(file)
    assert f"{file} line 3" in str(caught.value)
    assert message in str(caught.value)


def test_a_line_overrides_parameters(tmp_path: Path) -> None:
    """Keys are those of GenerateParams and SamplingParams; others come from the command line."""
    own = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "max_new_tokens": 3}
    own |= {"stop": ["end"], "stop_token_ids": [5], "ignore_eos": True, "raw": True}
    own |= {"specpv_retrieval_blocks": "auto", "dsa_top_k": 8, "exact": None}
    own |= {"guide": {"choice": ["yes", "no"]}}
    line = json.dumps({"id": "a", "prompt": "x", **own}).encode()
    plain, placed = read_prompt_file(write(tmp_path, GOOD + line))
    others = GenerateParams(max_new_tokens=99, sampling=SamplingParams(top_k=2, seed=1))
    assert plain.params(others) == others
    assert placed.params(others) == GenerateParams(
        max_new_tokens=3,
        sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=4, seed=7),
        stop=("end",),
        stop_token_ids=(5,),
        ignore_eos=True,
        raw=True,
        specpv_retrieval_blocks="auto",
        dsa_top_k=8,
        guide=Guide.choice(["yes", "no"]),
    )
    cold = read_prompt_file(write(tmp_path, b'{"id": "a", "prompt": "x", "temperature": -1}'))
    with pytest.raises(SpecbuildError, match="line 1: temperature is -1"):
        cold[0].params(others)


@pytest.mark.parametrize(
    ("guide", "message"), [("{", "--guide is not JSON"), ("[]", "--guide must be an object")]
)
def test_the_error_names_the_option_of_an_invalid_guide(guide: str, message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        guide_of(guide)


def test_prompts_without_overrides_have_no_parameters(tmp_path: Path) -> None:
    line = b'{"id": "a", "prompt_ids": [1], "seed": 3}'
    with pytest.raises(SpecbuildError, match="line 1: seed cannot be of one prompt alone"):
        tokenised(None, read_prompt_file(write(tmp_path, line)), GenerateParams())


def test_rejects_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="holds no prompts"):
        read_prompt_file(write(tmp_path, b""))


def test_the_last_line_may_lack_a_newline(tmp_path: Path) -> None:
    assert len(read_prompt_file(write(tmp_path, GOOD + GOOD.rstrip()))) == 2


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), min_size=1, max_size=5))
def test_written_prompts_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    lines = [json.dumps({"id": str(i), "prompt_ids": ids}) for i, ids in enumerate(prompts)]
    file = write(tmp_path_factory.mktemp("prompts"), "\n".join(lines).encode())
    assert [list(p.prompt.prompt_ids or ()) for p in read_prompt_file(file)] == prompts


@given(st.binary(max_size=60))
def test_any_bytes_give_prompts_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = write(tmp_path_factory.mktemp("prompts"), data)
    try:
        assert read_prompt_file(file)
    except SpecbuildError as error:
        assert str(file) in str(error)


def test_prompt_and_prompts_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="give one of them"):
        read_prompts("x", write(tmp_path, GOOD))


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    given_text = io.TextIOWrapper(io.BytesIO('{"id": "ä"}\nzwei\n'.encode()))
    monkeypatch.setattr(sys, "stdin", given_text)
    (prompt,) = read_prompts(None, None)
    assert prompt.prompt.prompt == '{"id": "ä"}\nzwei'


def test_rejects_empty_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(SpecbuildError, match="standard input: the prompt is empty"):
        read_prompts(None, None)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_rejects_an_endless_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "MAX_PROMPT_BYTES", 1 << 16)
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(SpecbuildError, match="standard input has more than 65536 bytes"):
            read_prompts(None, None)
    with pytest.raises(SpecbuildError, match="a line has more than 65536 bytes"):
        read_prompt_file(Path("/dev/zero"))


def test_ids_may_repeat(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    assert [placed.prompt.prompt for placed in read_prompt_file(file)] == ["x", "y"]
