"""The constraint of a complete output: its content and tool calls, in the model's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.reasoning import THINK, ReasoningMarkers, ReasoningState
from specbuild.runtime.serve.parsers.tool_call_formats import ToolCallFormat

_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class OutputConstraint:
    """The allowed outputs of a request.

    ``content`` is the guide of the answer. ``calls`` are the functions that may be called, with the
    guides of their arguments. With ``requires_call`` the output must be a call, else it is an
    answer or a call. With ``allows_several``, calls may follow each other. Reasoning before them is
    unconstrained.
    """

    content: Guide | None
    calls: Sequence[tuple[str, Guide]] = ()
    requires_call: bool = False
    allows_several: bool = False
    name: str = "response_format"

    @property
    def answer(self) -> Guide | None:
        """The guide of an answer; None if the output must be a call."""
        return None if self.requires_call else self.content

    @property
    def alternatives(self) -> str:
        """The grammar expression of the alternatives: an answer, calls, or both."""
        answers = [] if self.answer is None else ["answer"]
        return " | ".join([*answers, *(["calls"] if self.calls else [])])

    def grammar(self, rules: Sequence[str], parts: Mapping[str, Guide]) -> Guide:
        """Return a grammar of ``rules``. They refer to ``parts`` by name, and to the answer as
        ``content``.
        """
        answer = {} if self.answer is None else {"content": self.answer}
        text = "\n".join([*rules, _TEXT])
        return Guide.grammar(text, parts={**parts, **answer}, name=self.name)


def harmony_guide(control: Mapping[str, int], constraint: OutputConstraint) -> Guide:
    """Return a guide: any analysis messages, then the final message or a call, which ends the turn.

    The output starts after ``<|start|>assistant``. Messages end with control tokens, which cannot
    occur in text, so text within messages is unconstrained.
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
    markers: ReasoningMarkers = THINK,
    call_format: ToolCallFormat | None,
) -> Guide:
    """Return a guide: reasoning if the prompt allows it, then the answer or calls.

    Reasoning is between ``markers``. ``token_id`` returns the id of a marker that is one token,
    else None. RequestError if a strict schema of arguments has keywords that the call format cannot
    enforce.
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
        header = f" {_literal(markers.header)}" if markers.header else ""
        rules.append(f"open: {marker(markers.begin_token)}{header}")
        if token_id(markers.end) is None:
            rules += ["thought: reasons SPACE", f"reasons[suffix={_literal(markers.end)}]: TEXT"]
        else:
            rules.append(f"thought: TEXT {marker(markers.end)} SPACE")
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
    """Return the rule ``calls`` and its dependencies; ``bodies`` are the expressions between
    markers.
    """
    end = "" if call_format.end is None else f" SPACE {marker(call_format.end)}"
    call = f"call: {marker(call_format.begin)} SPACE ({' | '.join(bodies)}){end}"
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
    """Return a text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)
