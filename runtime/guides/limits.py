"""Limits of a guide's text that hold before llguidance compiles it.

llguidance recurses along chains of definitions, so a chain has a largest depth. It also computes
the text that a grammar forces as one run, however long that is: rules that double each other force
gigabytes. A forced run is a prefix of every completion, so no run that begins with a rule is longer
than the rule's shortest text. :func:`forces_little` bounds that length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime.guides.lark_limits import LarkLimits
from specbuild.runtime.guides.regex_limits import MAX_DEPTH, TooDeepError
from specbuild.runtime.guides.schema_limits import SchemaLimits

# llguidance tokenizes so much in 30 ms.
MAX_FORCED_BYTES = 1 << 15


def check_grammars(grammars: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why llguidance must not compile these grammars; None where it may."""
    try:
        for grammar in grammars:
            if "json_schema" in grammar and grammar["json_schema"] is not None:
                SchemaLimits(grammar["json_schema"]).check_depth()
            else:
                lark = LarkLimits(grammar["lark_grammar"])
                if lark.has_parameters:
                    return "has parametric rules, which are not offered"
                lark.check_depth()
    except (TooDeepError, RecursionError):
        return (
            f"is nested too deeply: at most {MAX_DEPTH} definitions may refer to each other in a "
            "chain"
        )
    return None


def forces_little(grammars: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no text that these grammars force exceeds ``MAX_FORCED_BYTES``."""
    parts: dict[str, float] = {}
    try:
        for grammar in reversed(grammars):
            if grammar.get("json_schema") is not None:
                length = SchemaLimits(grammar["json_schema"]).longest()
            else:
                length = LarkLimits(grammar["lark_grammar"], parts).longest()
            # A product of zero and infinity is not a number, and no bound.
            if not length <= MAX_FORCED_BYTES:
                return False
            if "name" in grammar:
                parts[grammar["name"]] = length
    except (TooDeepError, RecursionError):
        return False
    return True
