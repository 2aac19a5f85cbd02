"""Compilation of guides to grammars over an engine's tokens, with llguidance.

llguidance is native code. A guide that overflows the stack ends the process, and a guide that
compiles for minutes occupies a processor. So a guide must pass the checks of ``limits.py`` first.
A server also compiles it in a separate process (``checker.py``) before this process compiles it.
(M. Moskal et al., "llguidance", github.com/guidance-ai/llguidance.)
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from specbuild.runtime.guides.checker import CheckedGuide, GuideChecker
from specbuild.runtime.guides.grammar import Grammar, reason_of
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.limits import check_grammars
from specbuild.runtime.guides.remote import MAX_FOLLOWERS, RemoteGrammar

# White space as in Python's json.dumps, the most frequent form in training data. If white space
# were free, a model could emit it without end, and text after a comma would not be forced.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The maximum number of cached grammars. Each may hold as many lexer states as LIMITS allow. A state
# takes about 2 kB.
MAX_CACHED = 16
# llguidance's own limits. The time to compile grows with the square of the number of optional
# properties; about 2500 of them compile.
LIMITS = {
    "max_grammar_size": 20_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
# llguidance recurses. The checker's stack is smaller than this one and than the decoding thread's
# (8 MiB). So a guide that passes the checker overflows neither.
COMPILE_STACK_BYTES = 64 << 20
_stack_size_lock = threading.Lock()

Result = TypeVar("Result")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an engine, for llguidance.

    ``tokenizer`` is the text of a tokenizer.json, or an llguidance.TokenizerWrapper. The model has
    ``size`` tokens; ``ends`` are the ids of its end-of-sequence tokens.
    """

    tokenizer: Any
    size: int
    ends: Sequence[int]


class GrammarCompiler:
    """Compiles guides for one vocabulary, from any thread, and caches the latest grammars.

    With ``isolated`` a separate process compiles each guide first, under limits of processor time
    and memory. :meth:`close` ends that process.
    """

    def __init__(self, vocabulary: Vocabulary, *, isolated: bool = False) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._cached: OrderedDict[Guide, Grammar | RemoteGrammar] = OrderedDict()
        self._checker: GuideChecker | None = None
        self._followers = threading.Semaphore(MAX_FOLLOWERS)
        if isolated:
            description = {
                "tokenizer": vocabulary.tokenizer,
                "size": vocabulary.size,
                "ends": list(vocabulary.ends),
            }
            self._checker = GuideChecker(description)

    def compile(self, guide: Guide) -> Grammar | RemoteGrammar:
        """Return the grammar of a guide.

        Raises RequestError, with the guide's name and a reason, if the guide is invalid or exceeds
        a limit. It is also raised if llguidance is missing or cannot read the tokenizer.
        """
        with self._lock:
            cached = self._cached.get(guide)
            if cached is not None:
                self._cached.move_to_end(guide)
                return cached
        library = load_library(guide)
        if self._checker is not None:
            self._checker.start()
        with self._lock:
            if self._tokens is None:
                self._tokens = read_tokens(library, self._vocabulary, guide)
        checked = None if self._checker is None else self._checker.check(guide)
        grammar: Grammar | RemoteGrammar
        if checked is None or checked.is_light:
            text = checked_text(library, guide) if checked is None else checked.text
            grammar = on_stack(
                lambda: compile_text(library, self._tokens, text, guide), COMPILE_STACK_BYTES
            )
            if checked is not None:
                grammar.move = self._remote(guide, checked).begin
        else:
            grammar = self._remote(guide, checked)
        with self._lock:
            self._cached[guide] = grammar
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return grammar

    def _remote(self, guide: Guide, checked: CheckedGuide) -> RemoteGrammar:
        assert self._checker is not None
        return RemoteGrammar(self._checker, guide, checked.first, self._followers)

    def close(self) -> None:
        """End the checking process; checks in progress fail."""
        if self._checker is not None:
            self._checker.close()


def load_library(guide: Guide) -> Any:
    """Return the module llguidance. RequestError if it cannot be imported."""
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise guide.error(
            f"needs llguidance, of the extra serve, which cannot be loaded: {error}"
        ) from error


def read_tokens(library: Any, vocabulary: Vocabulary, guide: Guide) -> Any:
    """Return llguidance's tokenizer. RequestError if it cannot read the vocabulary."""
    try:
        return library.LLTokenizer(
            vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.ends) or None
        )
    except Exception as error:  # the library raises bare Exceptions
        raise guide.error(
            f"is not supported here: llguidance cannot read the engine's tokenizer: {error}"
        ) from error


def checked_text(library: Any, guide: Guide) -> str:
    """Return a guide in llguidance's JSON format. RequestError if it exceeds a limit of
    ``limits.py``.

    The text is a list of grammars: first that of the guide, then those of its parts. The first
    grammar refers to the others by name.
    """
    try:
        grammars = [_one_grammar(library, guide)]
        for name, part in guide.parts:
            grammars.append(_one_grammar(library, part) | {"name": name})
    except RecursionError:
        raise guide.error("is nested too deeply") from None
    except Exception as error:  # the converter of GBNF raises exceptions of any type
        raise guide.error(f"cannot be read: {error}") from error
    reason = check_grammars(grammars)
    if reason is not None:
        raise guide.error(reason)
    return json.dumps({"grammars": grammars})


def compile_text(library: Any, tokens: Any, text: str, guide: Guide) -> Grammar:
    """Compile a guide in llguidance's JSON format, and compute the first mask of its grammar.

    llguidance releases the interpreter's lock while it compiles and while it computes a mask.
    """
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(tokens, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise guide.error(f"cannot be compiled: {reason_of(matcher)}")
    grammar = Grammar(matcher)
    first = grammar.begin()
    if first.mask(np.zeros(0, np.int32)) is None:
        raise guide.error(f"cannot be followed: {first.failure or 'it allows nothing'}")
    return grammar


def on_stack(call: Callable[[], Result], stack_bytes: int) -> Result:
    """Run ``call`` in a thread with a stack of this size. Return its result or raise its error."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="specbuild-guide", daemon=True)
    # The stack size is a process-wide setting for new threads.
    with _stack_size_lock:
        previous = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(previous)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _one_grammar(library: Any, guide: Guide) -> dict[str, Any]:
    if guide.kind == "json":
        schema = json.loads(guide.source)
        lenient = {"lenient": guide.lenient, "coerce_one_of": guide.lenient}
        return {"json_schema": {**schema, "x-guidance": JSON_FORM | lenient}}
    if guide.kind == "regex":
        description = json.loads(library.LLMatcher.grammar_from_regex(guide.source))
        (grammar,) = description["grammars"]
        return dict(grammar)
    if guide.kind == "choice":
        quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(guide.source))
        return {"lark_grammar": f"start: {' | '.join(quoted)}"}
    # The converter returns Lark text unchanged.
    return {"lark_grammar": library.gbnf_to_lark.any_to_lark(guide.source)}
