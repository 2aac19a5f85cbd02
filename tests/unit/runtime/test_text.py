"""Text input and output: complete characters, stop strings anywhere, chat templates."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.text import chat_template
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.stream import StopText

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte; other than ASCII needs several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def codec(template: str | None = None, **config: object) -> TextCodec:
    return TextCodec(
        byte_tokenizer().to_str().encode(),
        json.dumps(config).encode(),
        None if template is None else template.encode(),
    )


BYTES = codec()
ENCODE = byte_tokenizer().encode


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_pieces_are_complete_characters_and_join_to_the_text(text: str) -> None:
    stream = BYTES.stream()
    pieces = [stream.push(i) for i in ENCODE(text).ids]
    assert "".join(pieces) + stream.finish() == text == stream.emitted
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        for piece, length in zip(pieces, range(1, len(pieces) + 1), strict=True):
            whole = BYTES.decode(ENCODE(text).ids[:length])
            assert ("\ufffd" in whole[-1:]) <= (piece == "")


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    stream = BYTES.stream()
    ids = ENCODE("a\u20ac").ids
    assert [stream.push(i) for i in ids[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """By brute force: cut where the shortest prefix first contains a stop string."""
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    expected, expected_count = text, len(pieces)
    for count in range(1, len(pieces) + 1):
        so_far = "".join(pieces[:count])
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            expected, expected_count = so_far[: min(places)], count
            break
    stream = StopText(stops)
    given_out, pushed = "", 0
    for piece in pieces:
        given_out += stream.push(piece)
        pushed += 1
        assert expected.startswith(given_out), "text was given out that a stop string took back"
        if stream.stopped:
            break
    given_out += "" if stream.stopped else stream.finish()
    assert (given_out, pushed) == (expected, expected_count)
    assert stream.emitted == expected
    assert stream.stopped == any(stop in text for stop in stops)


def test_a_prompt_passes_through_the_template_unless_raw() -> None:
    chat = codec(TEMPLATE)
    assert chat.has_template
    assert chat.decode(chat.encode("hi", raw=False, most_tokens=99)) == "<user>hi<assistant>"
    assert chat.decode(chat.encode("hi", raw=True, most_tokens=99)) == "hi"
    assert not BYTES.has_template
    assert BYTES.decode(BYTES.encode("hi", raw=False, most_tokens=99)) == "hi"


def test_the_template_gets_special_tokens_and_helpers() -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%Y')|length }}{{ {'a': 'é<'}|tojson }}"
        "{% generation %}{{ eos_token }}{% endgeneration %}"
        "{% for m in messages %}{% break %}{% endfor %}"
    )
    chat = codec(template, bos_token="<bos>", eos_token={"content": "<eos>"})
    assert chat.render([{"role": "user", "content": "x"}]) == '<bos>4{"a": "é<"}<eos>'


def test_special_tokens_are_no_text() -> None:
    ids = byte_tokenizer().encode("<bos>hi<eos>").ids
    assert len(ids) == 4
    assert BYTES.decode(ids) == "hi"


@pytest.mark.parametrize("config", [TEMPLATE, [1, {"name": "default", "template": TEMPLATE}]])
def test_the_template_may_be_in_the_config(config: object) -> None:
    chat = codec(chat_template=config)
    assert chat.render([{"role": "user", "content": "x"}]) == "<user>x<assistant>"


def test_the_error_has_the_message_of_the_template() -> None:
    chat = codec("{{ raise_exception('no user turns here') }}")
    with pytest.raises(RequestError, match="no user turns here"):
        chat.encode("hi", raw=False, most_tokens=99)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 7)|list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
    ids=["classes", "division", "too much", "without end"],
)
def test_the_template_runs_in_a_sandbox(template: str) -> None:
    chat = codec(template)
    with pytest.raises(RequestError, match="refuses"):
        chat.encode("hi", raw=False, most_tokens=99)


@pytest.mark.parametrize(
    ("tokenizer", "config", "template", "message"),
    [
        (b"{}", None, None, "tokenizer.json"),
        (b"\xff", None, None, "tokenizer.json"),
        (None, b"{", None, "tokenizer_config.json"),
        (None, b"[]", None, "tokenizer_config.json"),
        (None, b"\xff", None, "tokenizer_config.json"),
        (None, b"[" * 100_000, None, "tokenizer_config.json"),
        (None, None, b"\xff", "template"),
    ],
)
def test_rejects_damaged_text_files(
    tokenizer: bytes | None, config: bytes | None, template: bytes | None, message: str
) -> None:
    with pytest.raises(EngineFileError, match=message):
        TextCodec(tokenizer or byte_tokenizer().to_str().encode(), config, template)


def test_a_chat_has_the_special_tokens_of_the_template_only() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<bos>": 0, "hi": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    text = TextCodec(tokenizer.to_str().encode(), None, b"<bos> {{ messages[0].content }}")
    assert text.encode("hi", raw=True, most_tokens=99) == (0, 1)
    assert text.encode("hi", raw=False, most_tokens=99) == (0, 1)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("token", ["<bos>", {"content": "<bos>"}])
@pytest.mark.parametrize(
    ("flag", "begins"), [(True, True), (False, False), (None, None), ("yes", None)]
)
def test_the_flag_of_the_tokenizer_determines_the_first_token(
    adds: bool, token: Any, flag: Any, begins: bool | None
) -> None:
    """``adds``: tokenizer.json adds the token. DeepSeek's does not, and its flag is true."""
    tokenizer = Tokenizer(models.WordLevel({"<bos>": 0, "hi": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>"])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    config = {"bos_token": token, "add_bos_token": flag}
    template = b"<bos>{{ messages[0].content }}"
    text = TextCodec(tokenizer.to_str().encode(), json.dumps(config).encode(), template)
    expected = (0, 1) if (adds if begins is None else begins) else (1,)
    assert text.encode("hi", raw=True, most_tokens=2) == expected
    assert text.encode("hi", raw=False, most_tokens=2) == (0, 1)
    if len(expected) == 2:
        with pytest.raises(RequestError, match="tokens"):
            text.encode("hi", raw=True, most_tokens=1)


def test_raw_prompts_of_deepseek_begin_with_its_first_token() -> None:
    folder = os.environ.get("DEEPSEEK_TOKENIZER")
    if folder is None:
        pytest.skip("DEEPSEEK_TOKENIZER names no folder with DeepSeek-V3's tokenizer")
    tokenizer, config = (
        (Path(folder) / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    text = TextCodec(tokenizer, config, None)
    ids = text.encode("Hi", raw=True, most_tokens=9)
    assert text.decode_all(ids) == "<｜begin▁of▁sentence｜>Hi"


def test_the_default_of_several_templates_is_used() -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).to_str().encode()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    text = TextCodec(tokenizer, json.dumps({"chat_template": named}).encode(), None)
    assert text.render([]) == "chat"


def test_the_date_of_a_template_is_that_of_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise every prompt of a server would change at midnight."""
    days = iter(datetime(2026, 11, day, 23, 59) for day in range(1, 9))

    class Clock:
        @staticmethod
        def now() -> datetime:
            return next(days)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    text = codec("{{ strftime_now('%d') }}")
    message = [{"role": "user", "content": "a"}]
    assert {text.render(message) for _ in range(3)} == {"01"}
