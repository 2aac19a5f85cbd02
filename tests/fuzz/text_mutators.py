"""Prompts, command lines and chat templates that a stranger, or an accident, may send."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz.byte_mutators import mutated_bytes

_TEXTS = (
    "", "the quick brown fox", "\0", "\ud800", "\udcff x", "\x1b]0;x\x07", "日本語 🙂", "\u202e",
    "a\u0300" * 500, "<|endoftext|>", "<|return|>", "{{ 7 * 7 }}", "x" * 100_000, "🙂" * 5000,
    " " * 10_000, "\r\n" * 100, "\ufeff",
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 28, 29, 319, 320, 2**31 - 1, 2**31, 2**63, 10**40, 0.5, 1e-6, 1e6, 1e308, -0.0,
    float("nan"), float("inf"), True, None, "1", "", (), [1], b"1",
)  # fmt: skip
_FIELDS = ("temperature", "top_p", "top_k", "seed")
_ASKED = ("max_new_tokens", "stop", "stop_token_ids", "specpv_retrieval_blocks", "dsa_top_k")
_OPTIONS = (
    "--temperature", "--top-p", "--top-k", "--seed", "--max-new-tokens", "--stop", "--draft-top-k",
    "--draft-depth", "--draft-tokens", "--threads", "--kv-pages", "--prompt", "--pin",
    "--specpv-retrieval-blocks", "--dsa-top-k", "--prefill-rows-per-turn",
)  # fmt: skip


def odd_text(random: Random) -> str:
    """A text that may hold anything that a Python string can."""
    text = random.choice(_TEXTS)
    if random.random() < 0.5:
        data, _ = mutated_bytes(random, text.encode("utf-8", "surrogatepass"))
        text = data.decode("utf-8", "surrogateescape")
    return text


def odd_request(random: Random) -> dict[str, Any]:
    """Arguments of Prompt, SamplingParams and GenerateParams, some of which are wrong."""
    ids: Any = [random.choice((1, 2, 3, *_NUMBERS)) for _ in range(random.randint(0, 4))]
    ids = random.choice((ids, [1] * random.choice((2, 47, 48, 100, 5000)), (3, 1, 2)))
    prompt = {"prompt_ids": ids} if random.random() < 0.6 else {"prompt": odd_text(random)}
    return {
        "prompt": prompt,
        "sampling": _some(random, _FIELDS),
        "params": _some(random, _ASKED) | {"raw": random.random() < 0.5},
    }


def odd_prompt_file(random: Random) -> bytes:
    """Lines of a prompts file."""
    fields = ("id", "prompt", "prompt_ids", "max_new_tokens", "temperature", "stop", "messages", "")
    lines = []
    for number in range(random.randint(1, 3)):
        line: dict[str, Any] = {"id": str(number), "prompt_ids": [1, 2, 3]}
        for name in random.sample(fields, random.randint(0, 3)):
            value = random.choice((*_NUMBERS[:-1], odd_text(random), [1, 2], {}))
            line[name] = value
        lines.append(json.dumps(line).encode())
    data = b"\n".join(lines)
    return mutated_bytes(random, data)[0] if random.random() < 0.5 else data


def odd_options(random: Random) -> list[str]:
    """Options of ``specbuild run``; an argument of a process has no zero byte."""
    words = []
    for name in random.sample(_OPTIONS, random.randint(1, 3)):
        value = random.choice((str(random.choice(_NUMBERS)), odd_text(random)))
        words += [name, value.replace("\0", "")]
    return words


def odd_template(random: Random) -> str:
    """A chat template: what its grammar gives, or bytes of a usual one changed."""
    if random.random() < 0.3:
        usual = "{% for m in messages %}<|x|>{{ m['role'] }}: {{ m.content | trim }}{% endfor %}"
        return mutated_bytes(random, usual.encode())[0].decode(errors="replace")
    return "".join(_statement(random, 2) for _ in range(random.randint(1, 2)))


def _some(random: Random, names: tuple[str, ...]) -> dict[str, Any]:
    return {n: random.choice(_NUMBERS) for n in random.sample(names, random.randint(0, 2))}


_ATOMS = (
    "messages", "messages[0]", "messages[0].content", "x", "tools", "range", "dict", "namespace()",
    "cycler", "joiner", "lipsum", "self", "loop", "caller", "raise_exception", "true",
    "none", "0", "1", "(-1)", "3", "10**9", "2**62", "1e308", "0.1", "''", "'abc' * 1000",
    "'%s' * 9",
    "[1, 2, 3]", "{'a': 1}", "(1, 2)", "range(10**9)", "range(1000)", "strftime_now('%Y')",
    "'{0.__class__}'", "'%999999999d'",
)  # fmt: skip
_FILTERS = (
    "abs", "attr('__class__')", "batch(3)", "capitalize", "center(10**9)", "default(1)", "dictsort",
    "escape", "first", "float", "format(1)", "groupby('a')", "indent(10**8)", "int", "items",
    "join(',')", "last", "length", "list", "lower", "map('upper')", "max", "pprint", "random",
    "reject('none')", "replace('a', 'b' * 1000)", "reverse", "round(99)", "safe", "select",
    "selectattr('role')", "slice(3)", "sort", "string", "sum", "title", "tojson",
    "tojson(indent=9)",
    "trim", "truncate(3)", "unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(1)",
    "xmlattr", "filesizeformat",
)  # fmt: skip
_MEMBERS = (
    ".__class__", ".__init__.__globals__", ".format(1)", ".format_map({})", ".mro()", "[0]", "[-1]",
    "[::2]", "['role']", ".items()", ".join(messages)", ".replace('a', 'aa')", ".append(1)", "()",
    ".split()", ".encode()", ".zfill(10**9)", ".ljust(10**9)", "(1, 2)", ".next()", ".x",
)  # fmt: skip
# What no chat template may say, or none can.
_REFUSED = (
    "{% include VALUE %}", "{% import VALUE as y %}", "{% extends VALUE %}", "{% do VALUE %}",
    "{% autoescape VALUE %}x{% endautoescape %}", "{# ", "{{ " * 300, "{% break %}",
)  # fmt: skip
_BINARY = ("+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or", "is not")


def _expression(random: Random, depth: int) -> str:
    way = random.randrange(6) if depth else 0
    if way <= 1:
        return random.choice(_ATOMS)
    inner = _expression(random, depth - 1)
    if way == 2:
        return f"({inner} | {random.choice(_FILTERS)})"
    if way == 3:
        return f"({inner}){random.choice(_MEMBERS)}"
    other = _expression(random, depth - 1)
    if way == 4:
        return f"({inner} if {other} else {_expression(random, depth - 1)})"
    return f"({inner} {random.choice(_BINARY)} {other})"


def _statement(random: Random, depth: int) -> str:
    value = _expression(random, 2)
    body = _statement(random, depth - 1) if depth else "x"
    if random.random() < 0.04:
        return random.choice(_REFUSED).replace("VALUE", value)
    return random.choice(
        (
            f"{{{{ {value} }}}}",
            f"{{{{ {value} }}}}",
            f"{{% for x in {value} %}}{body}{{% endfor %}}",
            f"{{% for x in messages recursive %}}{body}{{{{ loop(messages) }}}}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% else %}}{body}{{% endif %}}",
            f"{{% set x = {value} %}}{body}",
            f"{{% set x %}}{body}{{% endset %}}",
            f"{{% macro f(x) %}}{body}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
            f"{{% filter {random.choice(_FILTERS)} %}}{body}{{% endfilter %}}",
            f"{{% block b %}}{body}{{% endblock %}}{{{{ self.b() }}}}",
            f"{{% generation %}}{body}{{% endgeneration %}}",
            f"{{% with x = {value} %}}{body}{{% endwith %}}",
        )
    )
