"""Outputs whose parts stand between marks in the text: ``<think>`` and ``<tool_call>``.

Reasoning stands before ``</think>`` (DeepSeek-R1, Qwen3, GLM), calls as JSON objects with ``name``
and ``arguments`` between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specbuild.runtime.serve.parsers.parser import Decode, Delta
from specbuild.runtime.text.stream import Detokenizer, StopText, begun

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


class MarkedParser:
    """``thinks``: text before ``</think>`` is reasoning, whoever opened it.

    ``calls``: objects between ``<tool_call>`` marks are calls; one that is no JSON object with a
    name stays content. ``decode`` keeps special tokens, which marks are in some vocabularies; those
    named ``dropped``, such as ends of sequence, are left out.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str],
        *,
        thinks: bool,
        calls: bool,
        dropped: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = StopText(stop)
        self._dropped = frozenset(dropped)
        self._calls = calls
        self._state = "think" if thinks else "content"
        self._begun = False
        self._held = ""
        self._tools = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in content."""
        return self._stop.stopped

    @property
    def in_content(self) -> bool:
        """Whether neither reasoning nor a call is open."""
        return self._state == "content"

    def push(self, token_id: int) -> list[Delta]:
        """What became complete with a token."""
        if token_id in self._dropped:
            return []
        return self._advance(self._detokenizer.push(token_id), final=False)

    def finish(self) -> list[Delta]:
        """What was held back."""
        deltas = self._advance(self._detokenizer.flush(), final=True)
        rest = self._stop.finish()
        return [*deltas, Delta(rest)] if rest else deltas

    def _advance(self, new: str, *, final: bool) -> list[Delta]:
        self._held += new
        deltas: list[Delta] = []
        while (found := self._next(final=final)) is not None:
            deltas += found
        return deltas

    def _next(self, *, final: bool) -> list[Delta] | None:
        """One part of what is held; None where no more can be said yet."""
        if self._state == "think":
            return self._reasoning(final=final)
        if self._state == "call":
            return self._call(final=final)
        mark = CALL if self._calls else ""
        text, met = self._until(mark, final=final)
        if met:
            self._state = "call"
        if not text and not met:
            return None
        shown = self._stop.push(text) + (self._stop.finish() if met else "")
        return [Delta(shown)] if shown else []

    def _reasoning(self, *, final: bool) -> list[Delta] | None:
        if not self._begun:
            opened = self._held.lstrip()
            if THINK.startswith(opened) and opened != THINK and not final:
                return None
            self._begun = True
            self._held = opened.removeprefix(THINK)
        text, met = self._until(THINK_END, final=final)
        if met:
            self._state = "content"
        if not text and not met:
            return None
        return [Delta(reasoning=text)] if text else []

    def _call(self, *, final: bool) -> list[Delta] | None:
        body, mark, rest = self._held.partition(CALL_END)
        if not mark and not final:
            return None
        self._state, self._held = "content", rest
        called = _call_of(body)
        if called is None:
            return [Delta(f"{CALL}{body}{mark}")]
        self._tools += 1
        name, arguments = called
        tool = self._tools - 1
        return [Delta(tool=tool, name=name), Delta(tool=tool, arguments=arguments)]

    def _until(self, mark: str, *, final: bool) -> tuple[str, bool]:
        """The held text before a mark, and whether the mark is there; a begun mark is held."""
        text, met, rest = self._held.partition(mark) if mark else (self._held, "", "")
        if met:
            self._held = rest
            return text, True
        keep = 0 if final or not mark else begun(text, mark)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _call_of(body: str) -> tuple[str, str] | None:
    try:
        called: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        return None
    arguments = called.get("arguments", {})
    return called["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
