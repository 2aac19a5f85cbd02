"""The form of a whole output: what is asked of its content and calls, and what is around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.marked import CALL, CALL_END, THINK, THINK_END

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
    def parts(self) -> dict[str, Guide]:
        """The guides by the names that grammars call them by."""
        named = {f"arguments{i}": guide for i, (_, guide) in enumerate(self.calls)}
        if self.content is not None and not self.must_call:
            named["content"] = self.content
        return named

    @property
    def ways(self) -> str:
        """What may be, as names of rules of a grammar."""
        answers = [] if self.must_call or self.content is None else ["answer"]
        return " | ".join([*answers, *(["calls"] if self.calls else [])])

    def grammar(self, *rules: str) -> Guide:
        """A grammar whose rules refer to the parts."""
        return Guide.grammar("\n".join([*rules, _TEXT]), parts=self.parts, name=self.name)


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
    if "content" in asked.parts:
        rules.append(f'answer: {channel} "final" {json_mark} {message} @content {token["return"]}')
    if calls:
        rules.append(f"calls: {channel} ({' | '.join(calls)}) {token['call']}")
    return asked.grammar(*rules)


def marked_guide(token_id: Callable[[str], int | None], asked: AskedForm, *, thinks: bool) -> Guide:
    """Reasoning up to its mark where the model ``thinks``; then the answer, or calls between marks.

    ``token_id`` is that of a mark which is one token.
    """
    if not thinks and not asked.calls:
        assert asked.content is not None
        return asked.content

    def mark(text: str) -> str:
        found = token_id(text)
        return _quoted(text) if found is None else f"<[{found}]>"

    rules = [f"start: {'reasoning ' * thinks}({asked.ways})", r"SPACE: /[ \n]{0,2}/"]
    if thinks:
        opened = mark(THINK)
        if token_id(THINK_END) is None:
            rules += ["reasoning: thought SPACE", f"thought[suffix={_quoted(THINK_END)}]: TEXT"]
        else:
            rules.append(f"reasoning: {opened}? TEXT {mark(THINK_END)} SPACE")
    if "content" in asked.parts:
        rules.append("answer: @content")
    if asked.calls:
        begin, end = mark(CALL), mark(CALL_END)
        bodies = [
            f'"{{\\"name\\": " {_quoted(json.dumps(name))} ", \\"arguments\\": " @arguments{i} "}}"'
            for i, (name, _) in enumerate(asked.calls)
        ]
        more = "(SPACE call)*" if asked.several else ""
        rules += [f"calls: call {more}", f"call: {begin} SPACE ({' | '.join(bodies)}) SPACE {end}"]
    return asked.grammar(*rules)


def _quoted(text: str) -> str:
    """A text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False)
