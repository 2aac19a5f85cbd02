"""``tokenizer.json``, opened: what a damaged or foreign one could do is refused or contained."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from specbuild.runtime.errors import EngineFileError, RequestError, SpecbuildError
from specbuild.runtime.text.stream import Step

TOKENIZER_FILE = "tokenizer.json"
_TEXT_FAILURE = f"{TOKENIZER_FILE} fails at the text of tokens"
# A type or key in escapes, which nobody writes but who wants it unseen.
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
# Bytes that a rewriting of the text may add for each of its own, over all rewritings.
_MAX_GROWTH = 256
_MAX_ADDED_IDS = 4096
# Of a text with more characters a token than this, and of one that is too long, the beginning is
# tokenised first: the library takes 150 bytes and more for each byte of text.
_CHARACTERS_A_TOKEN = 8


class OpenedTokenizer:
    """Text to ids and back. Neither cuts nor fills up: what the file says of that is left out.

    Raises EngineFileError where the bytes are no tokenizer.
    """

    def __init__(self, data: bytes) -> None:
        from tokenizers import Tokenizer

        _check_charsmap(data)
        with _contained(EngineFileError, f"{TOKENIZER_FILE} is not a tokenizer"):
            self._tokenizer = Tokenizer.from_str(data.decode())
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            parts = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
            states = {name: _state(getattr(self._tokenizer, name)) for name in parts}
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            if _growth(states[name]) > _MAX_GROWTH:
                raise EngineFileError(f"{TOKENIZER_FILE}: its {name} blows text up; get it anew")
        # Such a decoder joins the bytes of tokens. So the text of a token of whole characters does
        # not depend on its neighbours. These texts by id, without and with special tokens:
        self._is_byte_level = (states["decoder"] or {}).get("type") == "ByteLevel"
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        if _added_ids(states["post_processor"]) > _MAX_ADDED_IDS:
            raise EngineFileError(
                f"{TOKENIZER_FILE}: its post_processor adds more than {_MAX_ADDED_IDS} tokens; "
                "get it anew"
            )

    def encode(self, text: str, *, special: bool, most_tokens: int | None = None) -> list[int]:
        """Ids of ``text``, with the special tokens around it if ``special``.

        Raises RequestError for text of more than ``most_tokens`` tokens, and where the tokenizer
        fails. Nothing is made of more bytes than so many tokens can have, nor of a text whose
        beginning has half as many again: a token behind it does not change so much.
        """
        if most_tokens is not None:
            self._check_length(text, most_tokens)
        encoding = self._encoding(text, special=special)
        if most_tokens is not None and len(encoding) > most_tokens:
            raise _too_many(f"{len(encoding)} tokens", most_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, most: int) -> None:
        size = len(text.encode())
        if size > most and size > most * self.longest_token_bytes:
            raise RequestError(
                f"the text has {size} bytes, but {most} tokens have at most "
                f"{most * self.longest_token_bytes}; shorten it, or build the engine with a "
                "larger max_seq_len"
            )
        beginning = text[: most * _CHARACTERS_A_TOKEN]
        if len(beginning) < len(text):
            found = len(self._encoding(beginning, special=False))
            if found > most + most // 2:
                raise _too_many(f"over {most} tokens", most)

    def _encoding(self, text: str, *, special: bool) -> Any:
        with _contained(RequestError, f"{TOKENIZER_FILE} fails at this text"):
            return self._tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ``ids``, with special tokens if ``special``."""
        with _contained(EngineFileError, _TEXT_FAILURE):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def steps(self, *, special: bool = False) -> Step:
        """A function of one id after the other: the text that it adds, as :meth:`decode` has it.

        None where it adds none, or bytes of a character only. EngineFileError where the tokenizer
        fails, or where the text of ids changes with those behind them.
        """
        from tokenizers.decoders import DecodeStream

        tokenizer, step = self._tokenizer, DecodeStream(skip_special_tokens=not special).step

        def stepped(token_id: int) -> str | None:
            # As `_contained`, which takes longer than a step.
            try:
                text: str | None = step(tokenizer, token_id)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                raise EngineFileError(f"{_TEXT_FAILURE}: {error}") from error
            return text

        if not self._is_byte_level:
            return stepped
        texts, is_waiting = self._texts[special], False

        def stepped_by_bytes(token_id: int) -> str | None:
            """As ``stepped``, in a tenth of the time for tokens of whole characters."""
            nonlocal is_waiting
            text = None if is_waiting else texts.get(token_id)
            if text is None:
                text, was_waiting = stepped(token_id), is_waiting
                is_waiting = text is None
                if text is not None and not was_waiting:
                    texts[token_id] = text
            return text

        return stepped_by_bytes

    @property
    def description(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``."""
        text: str = self._tokenizer.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token; None where the vocabulary has none such."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def word(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None where it has none of this id."""
        word: str | None = self._tokenizer.id_to_token(token_id)
        return word

    @cached_property
    def longest_token_bytes(self) -> int:
        """At least as many bytes as any token stands for."""
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)


class TokenDecoder:
    """The text of token ids, with special tokens if ``special``: all at once or one at a time."""

    def __init__(self, tokenizer: OpenedTokenizer, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special

    def __call__(self, ids: Sequence[int], /) -> str:
        """The text of ``ids``."""
        return self._tokenizer.decode(ids, special=self._special)

    def steps(self) -> Step:
        """A function of one id after the other (:class:`~specbuild.runtime.text.stream.Decode`)."""
        return self._tokenizer.steps(special=self._special)


def _too_many(count: str, most: int) -> RequestError:
    return RequestError(
        f"the text has {count}, at most {most} are taken; shorten it, or build the engine with a "
        "larger max_seq_len"
    )


@contextmanager
def _contained(kind: type[SpecbuildError], failure: str) -> Iterator[None]:
    """What the library raises, as an error of ours: bare Exceptions, and panics of Rust."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{failure}: {error}") from error


def _check_charsmap(data: bytes) -> None:
    """EngineFileError where a map of characters claims more bytes than it has.

    The library would ask for that much memory, and abort the process where it gets none.
    """
    if b"Precompiled" not in data and _ESCAPED_LETTER.search(data) is None:
        return
    try:
        left: list[Any] = [json.loads(data)]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                left += part.values()
                charsmap = part.get("precompiled_charsmap")
                if isinstance(charsmap, str):
                    raw = base64.b64decode(charsmap)
                    if int.from_bytes(raw[:4], "little") > len(raw):
                        raise ValueError("its precompiled_charsmap is damaged")
            elif isinstance(part, list):
                left += part
    except (ValueError, RecursionError) as error:
        raise EngineFileError(f"{TOKENIZER_FILE} is not a tokenizer: {error}") from error


def _state(part: Any) -> Any:
    """A part's own description, None where there is none."""
    return None if part is None else json.loads(part.__getstate__())


def _growth(state: Any) -> int:
    """How many bytes one byte becomes at most, by all that is written in its place."""
    growth = 1
    for part in _parts(state):
        growth *= max(1, len(str(part.get("content", "")).encode()))
        growth *= max(1, len(str(part.get("prepend", "")).encode()))
        growth = min(growth, _MAX_GROWTH + 1)
    return growth


def _added_ids(state: Any) -> int:
    """How many ids a text gets around it."""
    count = 0
    for part in _parts(state):
        special = part.get("special_tokens")
        if isinstance(special, dict):
            pieces = [p["SpecialToken"]["id"] for p in part["single"] if "SpecialToken" in p]
            count += sum(len(special[name]["ids"]) for name in pieces if name in special)
    return count


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """The description and all that stand in it."""
    left = [state]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part
