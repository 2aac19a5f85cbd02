"""The form of a whole output: what is asked of its content and calls, and what is around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.call_forms import CallForm
from specbuild.runtime.serve.parsers.marked import THINK, THINK_END, Thought

_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class AskedForm:
    """What an output has to be.

    ``content`` is a guide of the answer, ``calls`` are the arguments of each function that may be
    called: one of these has to be where ``must_call``, and where it is not, either. Several calls
    may follow each other where ``several``. Reasoning in front of it all is free.
    """

    content: Guide | None
    calls: Sequence[tuple[str, Guide]] = ()
    must_call: bool = False
    several: bool = False
    name: str = "response_format"

    @property
    def answer(self) -> Guide | None:
        """The guide of an answer that is not a call; None where there must be a call."""
        return None if self.must_call else self.content

    @property
    def ways(self) -> str:
        """What may be, as names of rules of a grammar."""
        answers = [] if self.answer is None else ["answer"]
        return " | ".join([*answers, *(["calls"] if self.calls else [])])

    def grammar(self, rules: Sequence[str], parts: Mapping[str, Guide]) -> Guide:
        """Return a grammar whose rules refer to ``parts``, and to the answer as ``content``."""
        answer = {} if self.answer is None else {"content": self.answer}
        text = "\n".join([*rules, _TEXT])
        return Guide.grammar(text, parts={**parts, **answer}, name=self.name)


def harmony_guide(control: Mapping[str, int], asked: AskedForm) -> Guide:
    """Messages to analysis as the model likes, then the final one or a call, which ends the turn.

    The output begins behind ``<|start|>assistant``. Ends of messages are control tokens, which no
    text can be: inside a message every text stays free.
    """
    token = {name: f"<[{token_id}]>" for name, token_id in control.items()}
    channel, message = token["channel"], token["message"]
    json_mark = f'(" "? {token["constrain"]} "json")?'
    again = f'{token["start"]} "assistant"'
    calls = [
        f'"commentary to=functions." {_quoted(name)} {json_mark} {message} @arguments{i}'
        for i, (name, _) in enumerate(asked.calls)
    ]
    rules = [
        f"start: analysis* ({asked.ways})",
        f'analysis: {channel} "analysis" {message} TEXT {token["end"]} {again}',
    ]
    if asked.answer is not None:
        rules.append(f'answer: {channel} "final" {json_mark} {message} @content {token["return"]}')
    if calls:
        rules.append(f"calls: {channel} ({' | '.join(calls)}) {token['call']}")
    parts = {f"arguments{i}": arguments for i, (_, arguments) in enumerate(asked.calls)}
    return asked.grammar(rules, parts)


def marked_guide(
    token_id: Callable[[str], int | None],
    asked: AskedForm,
    *,
    thought: Thought | None,
    calls: CallForm | None,
) -> Guide:
    """Reasoning as the prompt's end leaves it (``thought``); then the answer, or ``calls``.

    ``token_id`` is that of a mark which is one token. RequestError where a strict schema of
    arguments has keywords that the form of calls cannot enforce.
    """
    reasoning = {Thought.OPEN: "thought ", Thought.UNMARKED: "(open thought)? "}.get(
        thought or Thought.CLOSED, ""
    )
    if not reasoning and not asked.calls:
        assert asked.content is not None
        return asked.content

    def mark(text: str) -> str:
        found = token_id(text)
        return _quoted(text) if found is None else f"<[{found}]>"

    rules = [f"start: {reasoning}({asked.ways})", r"SPACE: /[ \n]{0,2}/"]
    if reasoning:
        rules.append(f"open: {mark(THINK)}")
        if token_id(THINK_END) is None:
            rules += ["thought: reasons SPACE", f"reasons[suffix={_quoted(THINK_END)}]: TEXT"]
        else:
            rules.append(f"thought: TEXT {mark(THINK_END)} SPACE")
    parts: dict[str, Guide] = {}
    if asked.answer is not None:
        rules.append("answer: @content")
    if asked.calls:
        assert calls is not None
        written = [
            calls.grammar(f"arguments{i}", name, arguments, mark, _quoted)
            for i, (name, arguments) in enumerate(asked.calls)
        ]
        rules += _call_rules(asked, calls, [call.body for call in written], mark)
        for call in written:
            rules += call.rules
            parts |= call.parts
    return asked.grammar(rules, parts)


def _call_rules(
    asked: AskedForm, form: CallForm, bodies: Sequence[str], mark: Callable[[str], str]
) -> list[str]:
    """The rule ``calls`` and what it refers to, with the bodies of calls between their marks."""
    call = f"call: {mark(form.begin)} SPACE ({' | '.join(bodies)}) SPACE {mark(form.end)}"
    calls = f"call {'(SPACE call)*' if asked.several else ''}"
    if form.section is not None:
        first, last = map(mark, form.section)
        calls = f"{first} SPACE {calls} SPACE {last}"
    return [
        f"calls: {calls}",
        call,
        "INDEX: /[0-9]{1,3}/",
        "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    ]


def _quoted(text: str) -> str:
    """A text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False)
