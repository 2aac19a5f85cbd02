"""The length of the shortest text that a regular expression matches, and shared limits."""

from __future__ import annotations

import re
from math import inf

# A chain of this many definitions takes less than half of the checker's stack.
MAX_DEPTH = 256
# The maximum nesting of brackets. llguidance's own limit is lower.
MAX_NESTING = 64
# The bytes of the longest UTF-8 character.
CHARACTER_BYTES = 4
# The atoms of a regular expression.
_REGEX = re.compile(
    r"""(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z\-]*:|[=!]|<[=!]))?)
    |(?P<flags>\(\?[a-zA-Z\-]+\))
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<repeat>\{\d*(?:,\d*)?\})
    |(?P<op>[*+?])
    |(?P<atom>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|\\[pP]\{[^}]*\}|\\[xuU]\{[^}]*\}|\\.|.)""",
    re.VERBOSE | re.DOTALL,
)


class TooDeepError(Exception):
    """The chain of definitions is too long."""


def min_repetitions(repeat: str) -> float:
    """Return the minimum number of repetitions for ``+``, ``*``, ``?`` or a count in braces."""
    if not repeat.startswith("{"):
        return float(repeat == "+")
    first = repeat[1:-1].partition(",")[0].strip()
    return float(first or 0)


def regex_length(pattern: str) -> float:
    """Return an upper bound of the bytes of the shortest text that a regular expression matches."""
    # Three lengths for each open group: the shortest alternative so far, the current alternative,
    # and the last atom of the current alternative.
    groups: list[list[float]] = [[inf, 0, 0]]
    for match in _REGEX.finditer(pattern):
        kind, value, group = match.lastgroup, match.group(), groups[-1]
        if kind == "open":
            groups.append([inf, 0, 0])
        elif kind == "bar":
            group[:] = [min(group[0], group[1]), 0, 0]
        elif kind == "close" and len(groups) > 1:
            groups.pop()
            length = min(group[0], group[1])
            groups[-1][1] += length
            groups[-1][2] = length
        elif kind in ("repeat", "op"):
            last = group[2]
            group[2] = min_repetitions(value) * last
            group[1] += group[2] - last
        elif kind == "atom":
            group[1] += CHARACTER_BYTES
            group[2] = CHARACTER_BYTES
    return min(groups[0][0], groups[0][1])
