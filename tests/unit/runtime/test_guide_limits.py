"""Limits of a guide's text and of the text that it forces, before llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.compiler import (
    GrammarCompiler,
    Vocabulary,
    checked_text,
    compile_text,
    read_tokens,
)
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.limits import MAX_FORCED_BYTES, forces_little
from specbuild.runtime.guides.regex_limits import MAX_DEPTH

TARGET = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss" / "target"


@cache
def vocabulary() -> Vocabulary:
    """The example's tokens: texts have many tokenizations."""
    config = json.loads((TARGET / "config.json").read_text())
    tokenizer = (TARGET / "tokenizer.json").read_text()
    return Vocabulary(tokenizer, config["vocab_size"], (config["eos_token_id"],))


@cache
def tokens() -> Any:
    return read_tokens(llguidance, vocabulary(), Guide.json())


def chain_of_references(count: int) -> Guide:
    defs: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return Guide.json({"$defs": defs | {f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"})


def chain_of_objects(count: int) -> Guide:
    defs: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(count)
    }
    return Guide.json({"$defs": defs | {f"a{count}": {}}, "$ref": "#/$defs/a0"})


def chain_of_unions(count: int, union: str) -> Guide:
    defs: dict[str, Any] = {f"a{i}": {union: [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(count)}
    return Guide.json({"$defs": defs | {f"a{count}": {}}, "$ref": "#/$defs/a0"})


def chain_of_rules(count: int, name: str) -> Guide:
    rules = [f'{name}{i}: "a" {name}{i + 1}' for i in range(count)]
    return Guide.grammar("\n".join([f"start: {name}0", *rules, f'{name}{count}: "b"']))


def part_of_a_grammar(count: int) -> Guide:
    return Guide.grammar("start: @arguments", parts={"arguments": chain_of_references(count)})


def inline_schema(count: int) -> Guide:
    return Guide.grammar(f"start: %json {chain_of_references(count).source}")


CHAINS: list[Callable[[int], Guide]] = [
    chain_of_references,
    chain_of_objects,
    lambda count: chain_of_unions(count, "allOf"),
    lambda count: chain_of_unions(count, "anyOf"),
    lambda count: chain_of_rules(count, "r"),
    lambda count: chain_of_rules(count, "R"),
    part_of_a_grammar,
    inline_schema,
]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_definitions_has_a_largest_depth(chain: Callable[[int], Guide]) -> None:
    for count in (MAX_DEPTH + 1, 1000, 3000):
        with pytest.raises(RequestError, match=f"too deeply: at most {MAX_DEPTH} definitions"):
            checked_text(llguidance, chain(count))
    guide = chain(50)
    compile_text(llguidance, tokens(), checked_text(llguidance, guide), guide)


@pytest.mark.parametrize("opened", ['{"items":', '{"allOf":[', '{"not":', "[" * 5])
def test_nested_text_has_a_largest_depth(opened: str) -> None:
    closed = {"{": "}", "[": "]"}
    ends = "".join(closed[c] for c in reversed(opened) if c in closed)
    source = '{"const":' + opened * 3000 + "1" + ends * 3000 + "}"
    with pytest.raises(RequestError, match="nested too deeply"):
        checked_text(llguidance, Guide("json", source))
    with pytest.raises(RequestError, match="nested too deeply"):
        checked_text(llguidance, Guide.grammar("start: " + "(" * 3000 + '"a"' + ")" * 3000))


def test_parametric_rules_are_not_offered() -> None:
    # A counter could repeat a text without a limit.
    with pytest.raises(RequestError, match="parametric rules"):
        checked_text(llguidance, Guide.grammar('start: r::0\nr::_: "a" r::incr(_)'))


def forced_little(guide: Guide) -> bool:
    return forces_little(json.loads(checked_text(llguidance, guide))["grammars"])


DOUBLED = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20))
TREE = {"type": "object", "required": ["v"], "properties": {"v": {"type": "string"}}}


@pytest.mark.parametrize(
    ("guide", "little"),
    [
        (Guide.json(TREE), True),
        (Guide.json({"type": "object", "properties": {f"p{i}": {} for i in range(500)}}), True),
        (Guide.regex("class [A-Z][a-z]{2,9}:"), True),
        (Guide.choice([f"abcd{i}" for i in range(2000)]), True),
        (Guide.grammar('start: "a" start "b" | "ab"'), True),
        (Guide.grammar('root ::= "a" b\nb ::= [a-z]{3} | ("x" | "y")*'), True),
        (Guide.choice(["a" * MAX_FORCED_BYTES]), False),
        (Guide.regex("(ab{100}){1000}"), False),
        (Guide.grammar(f'start: "q" r0 | "z"\n{DOUBLED}\nr20: "a"'), False),
        # The rule has no text, so the text that it forces has no end.
        (Guide.grammar('start: "z" | "a" r\nr: "abc" r'), False),
        (Guide.grammar("start: A\nA: /(aaa)+/ & /(aaaaa)+/"), False),
        (Guide.json({"$defs": {"n": {"required": ["n"], "properties": {"n": {"$ref": "#/$defs/n"}},
                     "type": "object"}}, "$ref": "#/$defs/n"}), False),
        (Guide.json({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}), False),
        (Guide.json({"type": "array", "minItems": 50_000, "items": {"const": 1}}), False),
    ],
)  # fmt: skip
def test_detects_guides_that_may_force_long_text(guide: Guide, little: bool) -> None:
    assert forced_little(guide) == little


texts = st.text("abc", min_size=1, max_size=8)


@st.composite
def rules(draw: st.DrawFn) -> str:
    """Return grammars whose rules refer to later ones, in every syntax of a rule."""
    count = draw(st.integers(1, 6))
    lines = []
    for i in range(count):
        later = [f"r{j}" for j in range(i + 1, count)]
        atoms = [f'"{draw(texts)}"', f"/{draw(texts)}{{2}}[ab]/", *later]
        options = draw(st.lists(st.lists(st.sampled_from(atoms), min_size=1, max_size=4),
                                min_size=1, max_size=3))  # fmt: skip
        repeat = draw(st.sampled_from(["", "?", "*", "+", "{3}", "{2,5}"]))
        body = " | ".join(" ".join(option) for option in options)
        lines.append(f"r{i}: ({body}){repeat} {draw(st.sampled_from(atoms))}")
    return "\n".join(["start: r0", *lines])


@examples(15)
@given(rules(), st.integers(0, 2**31 - 1))
def test_nothing_longer_is_forced_than_the_bound(text: str, seed: int) -> None:
    guide = Guide.grammar(text)
    if not forced_little(guide):
        return
    random = np.random.default_rng(seed)
    state = compile_text(llguidance, tokens(), checked_text(llguidance, guide), guide).begin()
    output = np.zeros(0, np.int32)
    while len(output) < 30 and (mask := state.mask(output)) is not None:
        assert len(tokens().decode_bytes(state.forced(output))) <= MAX_FORCED_BYTES
        allowed = np.flatnonzero(
            np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
        )
        output = np.append(output, np.int32(random.choice(allowed)))


def test_a_guide_of_the_engine_is_limited_without_a_server() -> None:
    compiler = GrammarCompiler(vocabulary())
    with pytest.raises(RequestError, match="nested too deeply"):
        compiler.compile(chain_of_references(3000))
