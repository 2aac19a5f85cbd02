"""A tokenizer of another project: nothing is cut, and panics and aborts become sentences."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbuild.runtime.errors import EngineFileError, RequestError, SpecbuildError
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.tokenizer import OpenedTokenizer

SPECIAL = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def base_tokenizer() -> dict[str, Any]:
    """Return the JSON of a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    return state


def with_part(name: str, **part: Any) -> bytes:
    return json.dumps(base_tokenizer() | {name: part}).encode()


def padding(**changes: Any) -> bytes:
    part = {"strategy": {"Fixed": 2**33}, "direction": "Right", "pad_to_multiple_of": None}
    part |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    return with_part("padding", **(part | changes))


def charsmap(raw: bytes) -> bytes:
    coded = base64.b64encode(raw).decode()
    return with_part("normalizer", type="Precompiled", precompiled_charsmap=coded)


def replacing(content: str, times: int = 1) -> bytes:
    one = {"type": "Replace", "pattern": {"Regex": "."}, "content": content}
    return with_part("normalizer", type="Sequence", normalizers=[one] * times)


def surrounded(ids: int) -> bytes:
    special = {"id": "s", "ids": [1] * ids, "tokens": ["a"] * ids}
    piece = {"SpecialToken": {"id": "s", "type_id": 0}}
    return with_part(
        "post_processor",
        type="TemplateProcessing",
        single=[piece] * ids,
        pair=[],
        special_tokens={"s": special},
    )


def encoded(data: bytes, text: str = "hello") -> list[int]:
    return OpenedTokenizer(data).encode(text, special=True, most_tokens=99)


@pytest.mark.parametrize(
    "data",
    [
        padding(),
        padding(strategy={"Fixed": 7}),
        padding(strategy="BatchLongest", pad_to_multiple_of=64),
        with_part("truncation", direction="Right", max_length=3, strategy="LongestFirst", stride=0),
        with_part("truncation", direction="Right", max_length=3, strategy="LongestFirst", stride=5),
    ],
    ids=["huge padding", "padding", "multiple", "truncation", "stride that panics"],
)
def test_nothing_is_cut_off_or_filled_up(data: bytes) -> None:
    assert encoded(data) == encoded(json.dumps(base_tokenizer()).encode())


@pytest.mark.parametrize(
    "data",
    [
        charsmap(b""),
        charsmap(b"\xff" * 64),
        charsmap(b"\xff" * 64).replace(b"ecompiled", b"\\u0065compiled"),
        replacing("x" * 1000),
        replacing("x" * 20, times=4),
        surrounded(1000),
        with_part("decoder", type="Replace", pattern={"String": "a"}, content="x" * 9999),
        b"[" * 100_000,
    ],
    ids=["panic", "abort", "escaped", "growth", "growths", "surrounded", "decoder", "depth"],
)
def test_rejects_files_that_would_crash_the_library(data: bytes) -> None:
    with pytest.raises(EngineFileError, match=r"tokenizer\.json"):
        OpenedTokenizer(data)


@pytest.mark.parametrize(
    "data",
    [
        charsmap(b"\0" * 4),
        with_part("pre_tokenizer", type="FixedLength", length=0),
        with_part("normalizer", type="Replace", pattern={"String": ""}, content="xyz"),
    ],
    ids=["charsmap", "length", "empty pattern"],
)
def test_a_panic_at_a_prompt_is_a_sentence(data: bytes) -> None:
    with pytest.raises(RequestError, match="fails at this text"):
        encoded(data)


def test_a_panic_at_a_token_is_a_sentence() -> None:
    opened = OpenedTokenizer(with_part("decoder", type="Strip", content="h", start=9, stop=9))
    with pytest.raises(EngineFileError, match="fails at the text of tokens"):
        opened.decode(encoded(json.dumps(base_tokenizer()).encode(), "h"))


def with_long_token(length: int) -> bytes:
    """Return the tokenizer with a long token that nothing merges into."""
    state = base_tokenizer()
    state["model"]["vocab"]["a" * length] = 256
    return json.dumps(state).encode()


def test_rejects_long_text_before_tokenizing_it() -> None:
    codec = TextCodec(with_long_token(4), None, b"{{ messages[0].content * 9 }}")
    assert len(codec.encode("a" * 99, raw=True, most_tokens=99)) == 99
    with pytest.raises(RequestError, match="has 100 tokens, at most 99"):
        codec.encode("a" * 100, raw=True, most_tokens=99)
    with pytest.raises(RequestError, match="has 397 bytes, but 99 tokens have at most 396"):
        codec.encode("a" * 397, raw=True, most_tokens=99)
    with pytest.raises(RequestError, match="has 450 bytes"):
        codec.encode("a" * 50, raw=False, most_tokens=99)


class Recording:
    """A tokenizer that records the amount of text that it gets."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.given: list[int] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.given.append(len(text))
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_of_a_text_that_is_too_long_the_beginning_is_tokenised() -> None:
    opened = OpenedTokenizer(with_long_token(1000))
    recording = opened._tokenizer = Recording(opened._tokenizer)
    with pytest.raises(RequestError, match=r"over 99 tokens, at most 99 .* max_seq_len"):
        opened.encode("b" * 90_000, special=True, most_tokens=99)
    assert recording.given == [8 * 99]


def test_a_long_text_of_long_tokens_is_not_truncated() -> None:
    merges = [("a" * n, "a" * n) for n in (1, 2, 4, 8)]
    vocabulary = {"a" * 2**i: i for i in range(5)} | {"b": 5}
    opened = OpenedTokenizer(Tokenizer(models.BPE(vocabulary, merges)).to_str().encode())
    # The beginning of 8 characters a token ends within a token.
    text = "a" * (16 * 50) + "b" * 20
    assert opened.encode(text, special=True, most_tokens=70) == [4] * 50 + [5] * 20
    with pytest.raises(RequestError, match="has 70 tokens, at most 69"):
        opened.encode(text, special=True, most_tokens=69)


Mutation = Callable[[Any], Any]
_LARGE = (2**31, 2**33, 2**63, 2**64 - 1, -1, 0, 1.5, True, None, "", [], {})


def numbers_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of numbers, words and switches outside the vocabulary."""
    if isinstance(data, dict):
        items = [(key, value) for key, value in data.items() if key != "vocab"]
    elif isinstance(data, list):
        items = list(enumerate(data[:2]))
    else:
        return [path]
    return [found for key, value in items for found in numbers_of(value, (*path, key))]


def mutants() -> list[bytes]:
    state = base_tokenizer()
    state["added_tokens"] = [{"id": 256, "content": "<s>", "special": True, **SPECIAL}]
    state["padding"] = json.loads(padding())["padding"]
    state["truncation"] = {
        "direction": "Right",
        "max_length": 9,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    state["post_processor"] = json.loads(surrounded(2))["post_processor"]
    state["normalizer"] = json.loads(replacing("ab", 2))["normalizer"]
    state["decoder"] = {"type": "Strip", "content": "h", "start": 0, "stop": 0}
    state["model"] |= {"merges": [], "unk_token": "a"}
    made = []
    for path in numbers_of(state):
        for value in _LARGE:
            changed = json.loads(json.dumps(state))
            part = changed
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            made.append(json.dumps(changed).encode())
    return made


def check_mutants() -> None:
    """Open and use every mutant; only errors of specbuild may occur."""
    for data in mutants():
        try:
            opened = OpenedTokenizer(data)
            opened.decode(opened.encode("hello <s> world", special=True, most_tokens=99))
        except SpecbuildError:
            continue


def test_no_changed_field_crashes_the_process() -> None:
    """In a separate process with limited memory, since an abort would end this one."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
        f"sys.path[:0] = {sys.path!r}; import test_tokenizer_file as t; t.check_mutants(); "
        "print('whole')"
    )
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.endswith("whole\n"), done.stderr[-2000:]
