"""The form of a whole output: what is asked of its content and calls, and what is around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.marker_parser import THINK, THINK_END, ReasoningState
from specbuild.runtime.serve.parsers.tool_call_formats import ToolCallFormat

_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class OutputConstraint:
    """What an output has to be.

    ``content`` is a guide of the answer, ``calls`` are the arguments of each function that may be
    called: one of these has to be where ``must_call``, and where it is not, either. Several calls
    may follow each other where ``several``. Reasoning in front of it all is free.
    """

    content: Guide | None
    calls: Sequence[tuple[str, Guide]] = ()
    requires_call: bool = False
    allows_several: bool = False
    name: str = "response_format"

    @property
    def answer(self) -> Guide | None:
        """The guide of an answer that is not a call; None where there must be a call."""
        return None if self.requires_call else self.content

    @property
    def alternatives(self) -> str:
        """What may be, as names of rules of a grammar."""
        answers = [] if self.answer is None else ["answer"]
        return " | ".join([*answers, *(["calls"] if self.calls else [])])

    def grammar(self, rules: Sequence[str], parts: Mapping[str, Guide]) -> Guide:
        """Return a grammar whose rules refer to ``parts``, and to the answer as ``content``."""
        answer = {} if self.answer is None else {"content": self.answer}
        text = "\n".join([*rules, _TEXT])
        return Guide.grammar(text, parts={**parts, **answer}, name=self.name)


def harmony_guide(control: Mapping[str, int], constraint: OutputConstraint) -> Guide:
    """Messages to analysis as the model likes, then the final one or a call, which ends the turn.

    The output begins behind ``<|start|>assistant``. Ends of messages are control tokens, which no
    text can be: inside a message every text stays free.
    """
    token = {name: f"<[{token_id}]>" for name, token_id in control.items()}
    channel, message = token["channel"], token["message"]
    json_mark = f'(" "? {token["constrain"]} "json")?'
    next_turn = f'{token["start"]} "assistant"'
    calls = [
        f'"commentary to=functions." {_literal(name)} {json_mark} {message} @arguments{i}'
        for i, (name, _) in enumerate(constraint.calls)
    ]
    rules = [
        f"start: analysis* ({constraint.alternatives})",
        f'analysis: {channel} "analysis" {message} TEXT {token["end"]} {next_turn}',
    ]
    if constraint.answer is not None:
        rules.append(f'answer: {channel} "final" {json_mark} {message} @content {token["return"]}')
    if calls:
        rules.append(f"calls: {channel} ({' | '.join(calls)}) {token['call']}")
    parts = {f"arguments{i}": arguments for i, (_, arguments) in enumerate(constraint.calls)}
    return constraint.grammar(rules, parts)


def marker_guide(
    token_id: Callable[[str], int | None],
    constraint: OutputConstraint,
    *,
    reasoning: ReasoningState | None,
    call_format: ToolCallFormat | None,
) -> Guide:
    """Reasoning as the prompt's end leaves it (``thought``); then the answer, or ``calls``.

    ``token_id`` is that of a mark which is one token. RequestError where a strict schema of
    arguments has keywords that the form of calls cannot enforce.
    """
    reasoning_rule = {
        ReasoningState.OPEN: "thought ",
        ReasoningState.UNMARKED: "(open thought)? ",
    }.get(reasoning or ReasoningState.CLOSED, "")
    if not reasoning_rule and not constraint.calls:
        assert constraint.content is not None
        return constraint.content

    def marker(text: str) -> str:
        marker_token = token_id(text)
        return _literal(text) if marker_token is None else f"<[{marker_token}]>"

    rules = [f"start: {reasoning_rule}({constraint.alternatives})", r"SPACE: /[ \n]{0,2}/"]
    if reasoning_rule:
        rules.append(f"open: {marker(THINK)}")
        if token_id(THINK_END) is None:
            rules += ["thought: reasons SPACE", f"reasons[suffix={_literal(THINK_END)}]: TEXT"]
        else:
            rules.append(f"thought: TEXT {marker(THINK_END)} SPACE")
    parts: dict[str, Guide] = {}
    if constraint.answer is not None:
        rules.append("answer: @content")
    if constraint.calls:
        assert call_format is not None
        grammars = [
            call_format.grammar(f"arguments{i}", name, arguments, marker, _literal)
            for i, (name, arguments) in enumerate(constraint.calls)
        ]
        rules += _call_rules(constraint, call_format, [call.body for call in grammars], marker)
        for call in grammars:
            rules += call.rules
            parts |= call.parts
    return constraint.grammar(rules, parts)


def _call_rules(
    constraint: OutputConstraint,
    call_format: ToolCallFormat,
    bodies: Sequence[str],
    marker: Callable[[str], str],
) -> list[str]:
    """The rule ``calls`` and what it refers to, with the bodies of calls between their marks."""
    call = (
        f"call: {marker(call_format.begin)} SPACE ({' | '.join(bodies)}) SPACE "
        f"{marker(call_format.end)}"
    )
    calls = f"call {'(SPACE call)*' if constraint.allows_several else ''}"
    if call_format.section is not None:
        first, last = map(marker, call_format.section)
        calls = f"{first} SPACE {calls} SPACE {last}"
    return [
        f"calls: {calls}",
        call,
        "INDEX: /[0-9]{1,3}/",
        "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    ]


def _literal(text: str) -> str:
    """A text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False)
