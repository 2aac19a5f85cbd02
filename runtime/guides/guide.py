"""Guides: constraints that requests put on their outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specbuild.runtime.errors import RequestError

# Larger guides are rejected before they are parsed.
MAX_GUIDE_BYTES = 1 << 18
MAX_CHOICES = 4096


@dataclass(frozen=True)
class Guide:
    """A constraint of an output, created by a class method and compiled by the engine.

    ``source`` is a JSON Schema, a regular expression, a JSON array of choices, or a grammar in Lark
    or GBNF. With ``lenient``, keywords of a schema that cannot be enforced are ignored; otherwise
    they are rejected. ``parts`` are other guides, to which a Lark grammar refers as ``@name``.
    ``name`` is the request field, for error messages.
    Raises RequestError if the source is too long or cannot be a guide.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    source: str
    lenient: bool = False
    parts: tuple[tuple[str, Guide], ...] = ()
    name: str = field(default="guide", compare=False)

    def __post_init__(self) -> None:
        try:
            size = len(self.source.encode()) + sum(len(part.source) for _, part in self.parts)
        except UnicodeEncodeError:
            raise self.error("is not Unicode text") from None
        if size > MAX_GUIDE_BYTES:
            raise self.error(f"has {size} bytes, may have {MAX_GUIDE_BYTES}")
        if not self.source:
            raise self.error("is empty")

    @classmethod
    def of(cls, value_by_kind: Mapping[str, Any], *, name: str = "guide") -> Guide:
        """Return the guide of an object whose one key is the kind: ``{"regex": "[ab]+"}``."""
        placeholder = cls("json", "{}", name=name)
        if not isinstance(value_by_kind, Mapping) or len(value_by_kind) != 1:
            raise placeholder.error('must be an object with one key, like {"regex": "[ab]+"}')
        ((kind, value),) = value_by_kind.items()
        match kind:
            case "json":
                return cls.json(value, name=name)
            case "json_object" if value is True:
                return cls.json(name=name)
            case "regex":
                return cls.regex(value, name=name)
            case "choice":
                return cls.choice(value, name=name)
            case "grammar":
                return cls.grammar(value, name=name)
        raise placeholder.error(f"is of the kind {kind!r}, must be json, regex, choice or grammar")

    @classmethod
    def json(
        cls,
        schema: Mapping[str, Any] | str | bool | None = None,
        *,
        lenient: bool = False,
        name: str = "guide",
    ) -> Guide:
        """Return a guide for JSON that ``schema`` allows. None allows any object.

        The schema is an object or JSON text.
        """
        placeholder = cls("json", "{}", lenient, name=name)
        if schema is None:
            return replace(placeholder, source='{"type":"object"}')
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise placeholder.error(f"is no JSON Schema: {error}") from None
        if parsed is False:
            raise placeholder.error("is false, which allows nothing")
        if parsed is not True and not isinstance(parsed, Mapping):
            raise placeholder.error("is not a JSON Schema: it must be an object")
        return replace(placeholder, source="{}" if parsed is True else text)

    @classmethod
    def regex(cls, pattern: str, *, name: str = "guide") -> Guide:
        """Return a guide for text that a regular expression matches completely."""
        return cls("regex", cls._text(pattern, name), name=name)

    @classmethod
    def choice(cls, choices: Sequence[str], *, name: str = "guide") -> Guide:
        """Return a guide for one of these texts."""
        placeholder = cls("choice", "[]", name=name)
        is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
        if not is_list or not all(isinstance(choice, str) for choice in choices):
            raise placeholder.error("must be a list of texts")
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            raise placeholder.error(f"must be 1 to {MAX_CHOICES} texts, none of them empty")
        return replace(placeholder, source=json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def grammar(
        cls, text: str, *, parts: Mapping[str, Guide] | None = None, name: str = "guide"
    ) -> Guide:
        """Return a guide for texts of a grammar in llguidance's Lark or llama.cpp's GBNF."""
        named_parts = tuple((parts or {}).items())
        return cls("grammar", cls._text(text, name), parts=named_parts, name=name)

    @classmethod
    def _text(cls, text: str, name: str) -> str:
        if not isinstance(text, str):
            raise cls("regex", "x", name=name).error("must be a text")
        return text

    def error(self, reason: str) -> RequestError:
        """Return an error about this guide."""
        return RequestError(f"{self.name} {reason}", field=self.name)
