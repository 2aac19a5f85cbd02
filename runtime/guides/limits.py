"""Limits of a guide's text, checked before llguidance compiles it.

llguidance recurses along chains of definitions, so the depth of chains is limited. It also computes
forced text in one run, however long. A few rules, each of which repeats the next one twice, can
force gigabytes. If a rule starts a forced run, every text of the rule starts with that run. So the
run is at most as long as the rule's shortest text. :func:`forces_little` checks that length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime.guides.lark_limits import LarkLimits
from specbuild.runtime.guides.regex_limits import MAX_DEPTH, TooDeepError
from specbuild.runtime.guides.schema_limits import SchemaLimits

# llguidance tokenizes this many bytes in 30 ms.
MAX_FORCED_BYTES = 1 << 15


def check_grammars(grammars: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reason why llguidance must not compile these grammars, or None."""
    try:
        for grammar in grammars:
            if "json_schema" in grammar and grammar["json_schema"] is not None:
                SchemaLimits(grammar["json_schema"]).check_depth()
            else:
                lark = LarkLimits(grammar["lark_grammar"])
                if lark.has_parameters:
                    return "has parametric rules, which are not supported"
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
            # Zero times infinity is NaN. The negated comparison rejects it too.
            if not length <= MAX_FORCED_BYTES:
                return False
            if "name" in grammar:
                parts[grammar["name"]] = length
    except (TooDeepError, RecursionError):
        return False
    return True
