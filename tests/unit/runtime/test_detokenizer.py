"""Decode ids one at a time with every kind of tokenizer; the text is that of all at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specbuild.runtime.text import stream
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.stream import Detokenizer

# What a tokenizer writes for the first bytes of a longer character, or for bytes of none.
INCOMPLETE = "\ufffd"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = ("\u2581", "\u2581the", "\u2581cat", "s", ".", "\u540d", "##ly", "'", "t")
SPECIAL = ("<s>", "<eos>")


def codec(vocab: dict[str, int], decoder: decoders.Decoder) -> TextCodec:
    """Return a tokenizer of these words, the last of which are special."""
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="s"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([word for word in SPECIAL if word in vocab])
    return TextCodec(tokenizer.to_str().encode(), None, None)


def numbered(words: Sequence[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}


def byte_level() -> TextCodec:
    """Return a tokenizer like GPT-2's: a token for each byte."""
    alphabet = [chr(byte) for byte in range(256)]
    spelled = bytes_to_letters()
    return codec(numbered([*(spelled[ord(c)] for c in alphabet), *SPECIAL]), decoders.ByteLevel())


def bytes_to_letters() -> list[str]:
    """Return GPT-2's letter for each byte: printable bytes are themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_fallback() -> TextCodec:
    """Return a tokenizer like Llama 2's: words, and bytes of other text.

    The first space of a text is omitted.
    """
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return codec(numbered([*BYTES, *WORDS, *SPECIAL]), decoders.Sequence(steps))


def metaspace() -> TextCodec:
    return codec(numbered([*WORDS, *SPECIAL]), decoders.Metaspace())


def word_pieces() -> TextCodec:
    """Return a tokenizer like BERT's: words with spaces between, unless they begin with ``##``."""
    return codec(numbered([*WORDS, *SPECIAL]), decoders.WordPiece(cleanup=False))


def cleaned_up() -> TextCodec:
    """Return :func:`word_pieces` whose text may change with the ids that follow."""
    return codec(numbered([*WORDS, *SPECIAL]), decoders.WordPiece(cleanup=True))


CODECS = {made.__name__: made() for made in (byte_level, byte_fallback, metaspace, word_pieces)}
RUNS = st.one_of(
    st.binary(min_size=1, max_size=3),
    st.sampled_from([b"\x80" * 20, b"\xe4" * 15, "\u540d".encode() * 9, b"\xf0\x9f\x98" * 7]),
)

FALLBACK_RUNS = st.sampled_from([b"\x80" * 20, b"\xe4", "\u540d".encode() * 9, "\xe9".encode()])


def checked_pieces(text: TextCodec, ids: Sequence[int], *, special: bool = False) -> None:
    """Check that each id gives the text that it completes, and all of them the complete text."""
    decode = text.decode_all if special else text.decode
    detokenizer, shown = Detokenizer(decode), ""
    for i, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        whole = decode(ids[:i])
        assert shown == whole or whole.endswith(INCOMPLETE)
    assert shown + detokenizer.flush() == decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(RUNS, max_size=6))
def test_pieces_of_any_bytes_are_their_text(runs: list[bytes]) -> None:
    data = b"".join(runs)
    text, expected = CODECS["byte_level"], data.decode(errors="replace")
    checked_pieces(text, list(data))
    assert text.decode(list(data)) == expected
    # Bytes of no character hold nothing back for long.
    held = len("".join(map(Detokenizer(text.decode).push, data)))
    assert expected[held:].count(INCOMPLETE) <= 16


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(CODECS)), special=st.booleans(), data=st.data())
def test_pieces_are_the_text_of_all_ids(name: str, special: bool, data: st.DataObject) -> None:
    text = CODECS[name]
    size = max(text.token_id(word) or 0 for word in SPECIAL) + 1
    words = st.integers(max(0, size - len(WORDS) - len(SPECIAL)), size - 1)
    runs = words.map(lambda token_id: [token_id])
    if text.token_id("<0x00>") == 0:
        # A run of bytes that is no text shows no character of it, so each has a word behind it.
        written = st.integers(256, 255 + len(WORDS))
        runs = st.one_of(runs, st.builds(lambda run, word: [*run, word], FALLBACK_RUNS, written))
    ids = [token_id for run in data.draw(st.lists(runs, max_size=20)) for token_id in run]
    checked_pieces(text, ids, special=special)


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    detokenizer = Detokenizer(CODECS["byte_level"].decode)
    ids = list("a\u20ac".encode())
    assert [detokenizer.push(i) for i in ids[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == INCOMPLETE


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_inner_spaces_are_kept_after_a_special_token(name: str) -> None:
    text = CODECS[name]
    ids = [text.token_id(word) for word in ("\u2581the", "<s>", "\u2581cat")]
    detokenizer = Detokenizer(text.decode)
    assert [detokenizer.push(i) for i in ids if i is not None] == ["the", "", " cat"]


@pytest.mark.parametrize("token", ["<eos>", "<0x80>"])
def test_ids_without_text_are_decoded_a_few_at_a_time(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens that are omitted, and bytes of no character."""
    text = CODECS["byte_fallback"]
    decode, most = text.decode, 0
    token_id = text.token_id(token)
    assert token_id is not None

    def counted(_self: object, ids: Sequence[int], /) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode._tokenizer.decode(ids)

    monkeypatch.setattr(type(decode), "__call__", counted)
    detokenizer = Detokenizer(decode)
    shown = "".join([*(detokenizer.push(token_id) for _ in range(1000)), detokenizer.flush()])
    assert shown == decode([token_id] * 1000)
    assert len(detokenizer._waiting) == 0
    assert most == 1000  # by the line above only
    assert stream._MAX_WAITING < 40


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=20))
def test_a_tokenizer_that_changes_earlier_text_fails_at_none(ids: list[int]) -> None:
    """``do n't`` becomes ``don't``: emitted text stays, and all later words follow."""
    text = cleaned_up()
    detokenizer = Detokenizer(text.decode)
    shown = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    letters = "".join(text.decode(ids).split())
    assert sorted("".join(shown.split())) == sorted(letters)
