"""Matches modules with a configuration's lists: names, parts of names, expressions, wildcards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from specbuild.builder.checkpoint.config_json import Config

Matcher = Callable[[str], bool]
_EXPRESSION = "re:"


def by_name(patterns: Sequence[str]) -> Matcher:
    """compressed-tensors' rule: exact names, and ``re:`` before expressions."""
    names = {pattern for pattern in patterns if not pattern.startswith(_EXPRESSION)}
    expressions = _compiled(
        p.removeprefix(_EXPRESSION) for p in patterns if p.startswith(_EXPRESSION)
    )
    return lambda module: module in names or any(e.match(module) for e in expressions)


def by_prefix_or_end(patterns: Sequence[str]) -> Matcher:
    """transformers' rule for ``modules_to_not_convert``: prefixes, as expressions, and suffixes."""
    expressions = _compiled(patterns)
    ends = tuple(patterns)
    return lambda module: module.endswith(ends) or any(e.match(module) for e in expressions)


def by_part(patterns: Sequence[str]) -> Matcher:
    """AutoAWQ's rule: any part of the name."""
    return lambda module: any(pattern in module for pattern in patterns)


def by_wildcard(patterns: Sequence[str]) -> Matcher:
    """ModelOpt's rule: names with ``*`` and ``?``."""
    return lambda module: any(fnmatchcase(module, pattern) for pattern in patterns)


def listed(section: Config, *fields: str) -> tuple[str, ...]:
    """Return the names in all of these fields."""
    return tuple(name for field in fields for name in section.texts(field))


def _compiled(patterns: object) -> list[re.Pattern[str]]:
    made = []
    for pattern in patterns:  # type: ignore[attr-defined]
        try:
            made.append(re.compile(pattern))
        except re.error:  # transformers, too, would only compare it as a name
            made.append(re.compile(re.escape(pattern)))
    return made
