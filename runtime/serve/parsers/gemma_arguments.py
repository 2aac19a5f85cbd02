"""Tool calls of Gemma 4: ``call:NAME{key:value,…}`` with strings between ``<|"|>``."""

from __future__ import annotations

import json
import re
from typing import Any

from specbuild.runtime.serve.parsers.arguments import Tools, UnclosedTextError, json_value

STRING = '<|"|>'
_MAX_DEPTH = 64
_HEADER = re.compile(r"\s*call:([\w.\-]+)\{")
_KEY = re.compile(r"\s*([^\s:{}\[\],<]+)\s*:")
_PLAIN = re.compile(r"[^,:{}\[\]<]+")
_GAP = re.compile(r"\s*")


class _InvalidError(Exception):
    """The text is not a call."""


def read_gemma_call(body: str, tools: Tools) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON text; None if invalid.

    UnclosedTextError if the text ends within a string.
    """
    del tools
    header = _HEADER.match(body)
    if header is None:
        return None
    reader = _Reader(body, header.end() - 1)
    try:
        arguments = reader.value(0)
    except _InvalidError:
        return None
    if body[reader.position :].strip():
        return None
    return header[1], json.dumps(arguments, ensure_ascii=False)


class _Reader:
    """Reads values from a position of a text on."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def value(self, depth: int) -> Any:
        """Return the value at the position."""
        if depth > _MAX_DEPTH:
            raise _InvalidError
        self._skip_space()
        if self._takes(STRING):
            return self._string()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._array(depth)
        plain = _PLAIN.match(self.text, self.position)
        if plain is None:
            raise _InvalidError
        self.position = plain.end()
        try:
            return json_value(plain[0])
        except ValueError:
            return plain[0].strip()  # as the model wrote it, without quotes

    def _string(self) -> str:
        end = self.text.find(STRING, self.position)
        if end < 0:
            raise UnclosedTextError
        found = self.text[self.position : end]
        self.position = end + len(STRING)
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closes("}", first=not found):
            key = self._key()
            found[key] = self.value(depth + 1)
        return found

    def _array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._closes("]", first=not found):
            found.append(self.value(depth + 1))
        return found

    def _key(self) -> str:
        """Return the key of a member; templates write those of nested objects as strings."""
        self._skip_space()
        if self._takes(STRING):
            key = self._string()
            self._skip_space()
            if not self._takes(":"):
                raise _InvalidError
            return key
        match = _KEY.match(self.text, self.position)
        if match is None:
            raise _InvalidError
        self.position = match.end()
        return match[1]

    def _closes(self, end: str, *, first: bool) -> bool:
        """Return whether ``end`` follows; else a comma must, but for the first element."""
        self._skip_space()
        if self._takes(end):
            return True
        if not first and not self._takes(","):
            raise _InvalidError
        return False

    def _skip_space(self) -> None:
        match = _GAP.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def _takes(self, text: str) -> bool:
        if not self.text.startswith(text, self.position):
            return False
        self.position += len(text)
        return True
