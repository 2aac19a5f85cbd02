"""Changes of a JSON document that leave it JSON, as far as its reader follows."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

# Stands for text that `json` would not write.
_MARK = "\ue000verbatim\ue000"
_VERBATIM = (
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000, "1" + "0" * 400, "1.0",
    "[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, '"\\ud800"', '"\\u0000"',
    "-0", "1e2", '{"a": 1, "a": 2}',
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 17, 255, 256, 4096, 2**31 - 1, 2**31, -(2**31), 2**32,
    2**33, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.5, 1e-30, 1e30, "", " ", "0",
    "a", "../a", "/etc/passwd", "x" * 100_000, "\x1b]0;title\x07", "名", [], {}, [0], [[]], {"": 0},
    [1] * 1000,
)  # fmt: skip


def mutated_json(random: Random, data: bytes, changes: int = 1) -> tuple[bytes, str]:
    """The document with so many changes, and the places where they were made."""
    holder = [json.loads(data)]
    places, verbatim = [], []
    for _ in range(changes):
        parent, key, path = _place(random, holder)
        verbatim += _change(random, holder, parent, key)
        places.append(".".join(map(str, path[1:])) or "the whole")
    text = json.dumps(holder[0], separators=(",", ":"))
    for words in verbatim:
        text = text.replace(f'"{json.dumps(_MARK)[1:-1]}"', words, 1)
    return text.encode(), "; ".join(places)


def _place(random: Random, holder: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """A value's parent, key and path: most often a leaf, one level after the other."""
    parent: Any = holder
    path: tuple[Any, ...] = ()
    while True:
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = random.choice(keys)
        path = (*path, key)
        value = parent[key]
        if not isinstance(value, dict | list) or not value or random.random() < 0.08:
            return parent, key, path
        parent = value


def _change(random: Random, holder: list[Any], parent: Any, key: Any) -> list[str]:
    """Changes a value of ``parent``; the text for each mark that it set."""
    value = parent[key]
    way = random.randrange(10)
    if way == 0 and parent is not holder:
        del parent[key]
    elif way == 1:
        parent[key] = copy.deepcopy(_elsewhere(random, holder))
    elif way == 2:
        parent[key] = _MARK
        return [random.choice(_VERBATIM)]
    elif way == 3 and isinstance(parent, dict):
        parent[random.choice(("", "unknown", f"{key}_", "名"))] = parent.pop(key)
    elif way == 4 and isinstance(parent, list) and parent is not holder:
        parent.insert(key, copy.deepcopy(value))
    elif way == 5 and isinstance(parent, list):
        random.shuffle(parent)
    elif type(value) is int and way < 9:
        parent[key] = random.choice((value + 1, value - 1, value * 2, -value, value // 2, value**3))
    else:
        parent[key] = copy.deepcopy(random.choice(_VALUES))
    return []


def _elsewhere(random: Random, holder: list[Any]) -> Any:
    parent, key, _ = _place(random, holder)
    return parent[key]
