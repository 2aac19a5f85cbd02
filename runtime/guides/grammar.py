"""Guides as grammars over an engine's tokens, by llguidance.

A mask says which tokens may come next: a token is allowed where the output can still become what
the grammar derives, an end of sequence where it has. llguidance's masks are canonical: where the
next bytes are forced, the one token that its tokenizer makes of them is allowed.

Compiling and masks are bounded in work and memory, whatever a client sends. (M. Moskal et al.,
"llguidance", github.com/guidance-ai/llguidance.)
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from specbuild.runtime.guides.guide import Guide

# As Python's json.dumps writes JSON, which models have read most. With whitespace left open a model
# may go on with it for ever, and what comes behind a comma is not forced.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Below what any other change to logits makes of a row: the grammar has the last word.
REFUSED = np.float32(-3e30)
# Grammars that stay compiled; each may hold LIMITS' lexer states, of about 2 kB.
MOST_KEPT = 16
# The time to compile grows as the square of optional properties, of which some 2500 go through:
# what is refused has cost two seconds at most. A mask takes 20 ms at most.
LIMITS = {
    "max_grammar_size": 20_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


class TokenMask:
    """Which tokens may come next; ``bits`` has one bit a token, the lowest first."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def allows(self, token: int) -> bool:
        """Whether a token may come."""
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    @cached_property
    def only(self) -> int | None:
        """The token that is allowed where it is one alone."""
        bits = int.from_bytes(self._bits, "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def words(self, count: int) -> np.ndarray:
        """The bits as int32 [count]: bit v % 32 of word v // 32."""
        packed = np.zeros(4 * count, np.uint8)
        bits = np.frombuffer(self._bits, np.uint8)[: len(packed)]
        packed[: len(bits)] = bits
        return packed.view(np.int32)

    def refuse(self, logits: np.ndarray) -> None:
        """Takes the other tokens out of one row ``logits`` fp32 [V], in place."""
        packed = np.frombuffer(self._bits, np.uint8)
        allowed = np.unpackbits(packed, count=len(logits), bitorder="little")
        np.copyto(logits, REFUSED, where=allowed == 0)


class GuideState:
    """A grammar's state of one output, whose tokens are given with every call.

    It goes from one output to another by what they have in common. One that met its limits has
    a :attr:`failure`, and masks nothing more.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._read = np.zeros(256, np.int32)
        self._count = 0
        self.failure: str | None = None

    def mask(self, output: np.ndarray) -> TokenMask | None:
        """What may follow ``output``, int32 [n]; None where nothing does, or it failed."""
        if self.complete(output) or self.failure is not None:
            return None
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
            return None
        if not any(bits):
            self.failure = "none of the model's tokens continues the output"
            return None
        return TokenMask(bits)

    def allows(self, output: np.ndarray, token: int) -> bool | None:
        """What :meth:`mask` says of one token, None where it is None.

        It takes microseconds. A mask may take a millisecond for 200 000 tokens, where no text
        before had such a place: in a text of bounded length none has.
        """
        if self.complete(output) or self.failure is not None:
            return None
        forced = self._matcher.compute_ff_tokens()
        follows = self._matcher.validate_tokens([token]) == 1 if not forced else forced[0] == token
        if self._matcher.is_error():
            self._fail()
            return None
        return bool(follows)

    def complete(self, output: np.ndarray) -> bool:
        """Whether ``output`` is what the grammar derives, and no text may follow."""
        self._follow(output)
        return self.failure is None and bool(self._matcher.is_stopped())

    def forced(self, output: np.ndarray) -> list[int]:
        """The only tokens that may follow ``output``, as far as there is no choice."""
        if self.complete(output) or self.failure is not None:
            return []
        return list(self._matcher.compute_ff_tokens())

    def _follow(self, output: np.ndarray) -> None:
        if self.failure is not None:
            return
        common = min(self._count, len(output))
        differing = np.flatnonzero(self._read[:common] != output[:common])
        if len(differing):
            common = int(differing[0])
        if self._count > common:
            self._matcher.rollback(self._count - common)
        new = output[common:]
        if len(output) > len(self._read):
            self._read = np.concatenate([self._read, np.zeros(len(output), np.int32)])
        self._read[common : len(output)] = new
        self._count = len(output)
        if len(new) and not self._matcher.consume_tokens(new.tolist()):
            self._fail()

    def _fail(self) -> None:
        self.failure = _reason(self._matcher)


class Grammar:
    """A compiled guide."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def begin(self) -> GuideState:
        """The state of an output without tokens."""
        return GuideState(self._matcher.deep_copy())


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as llguidance reads them.

    ``tokenizer`` is the text of a tokenizer.json, or an llguidance.TokenizerWrapper; the model has
    ``size`` tokens, and ``ends`` are its ends of sequence.
    """

    tokenizer: Any
    size: int
    ends: Sequence[int]


class GrammarCompiler:
    """Compiles guides for one vocabulary, from any thread; the last ones are kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._tokens: Any = None
        self._kept: OrderedDict[Guide, Grammar] = OrderedDict()

    def compile(self, guide: Guide) -> Grammar:
        """RequestError names the guide and the reason where it is none, or too large.

        So it does where llguidance is missing, or cannot read the tokenizer.
        """
        with self._lock:
            kept = self._kept.get(guide)
            if kept is not None:
                self._kept.move_to_end(guide)
                return kept
            library = _library(guide)
            if self._tokens is None:
                self._tokens = _read_tokens(library, self._vocabulary, guide)
        grammar = Grammar(_matcher(library, self._tokens, guide))
        first = grammar.begin()
        if first.mask(np.zeros(0, np.int32)) is None:
            raise guide.refused(f"cannot be followed: {first.failure or 'it allows nothing'}")
        with self._lock:
            self._kept[guide] = grammar
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar


def _library(guide: Guide) -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise guide.refused(
            f"needs llguidance, of the extra serve, which cannot be loaded: {error}"
        ) from error


def _read_tokens(library: Any, vocabulary: Vocabulary, guide: Guide) -> Any:
    try:
        return library.LLTokenizer(
            vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.ends) or None
        )
    except Exception as error:  # the library raises bare ones
        raise guide.refused(
            f"cannot be had: llguidance cannot read the engine's tokenizer: {error}"
        ) from error


def _matcher(library: Any, tokens: Any, guide: Guide) -> Any:
    """llguidance drops the interpreter's lock while it compiles: other threads go on."""
    try:
        text = _llguidance_text(library, guide)
    except Exception as error:  # the converter of GBNF raises what it meets
        raise guide.refused(f"cannot be read: {error}") from error
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(tokens, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise guide.refused(f"cannot be compiled: {_reason(matcher)}")
    return matcher


def _llguidance_text(library: Any, guide: Guide) -> str:
    """The guide first, then its parts, which it refers to by name."""
    grammars = [_one_grammar(library, guide)]
    for name, part in guide.parts:
        grammars.append(_one_grammar(library, part) | {"name": name})
    return json.dumps({"grammars": grammars})


def _one_grammar(library: Any, guide: Guide) -> dict[str, Any]:
    if guide.kind == "json":
        schema = json.loads(guide.source)
        lenient = {"lenient": guide.lenient, "coerce_one_of": guide.lenient}
        return {"json_schema": {**schema, "x-guidance": JSON_FORM | lenient}}
    if guide.kind == "regex":
        described = json.loads(library.LLMatcher.grammar_from_regex(guide.source))
        (grammar,) = described["grammars"]
        return dict(grammar)
    if guide.kind == "choice":
        quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(guide.source))
        return {"lark_grammar": f"start: {' | '.join(quoted)}"}
    # It leaves what is Lark already as it is.
    return {"lark_grammar": library.gbnf_to_lark.any_to_lark(guide.source)}


def _reason(matcher: Any) -> str:
    """The library's words up to where it goes on about its own state."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return " ".join(text.split())[:500] or "no reason is known"
