"""The protocol of output parsers, and the one of outputs that are text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.runtime.request import TokenEvent
from specbuild.runtime.text.stream import Stop, TextStream

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat: the prompt that an output continues.

    ``continued`` is the content of the assistant's message that the output continues. It is empty
    where the template opened a new turn. ``num_past_calls`` are the calls in all messages before.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    continued: str = ""
    num_past_calls: int = 0


@dataclass(frozen=True)
class Delta:
    """A piece of an output.

    ``tool`` is the number of a call, from 0 on: its first piece has its name, the others
    ``arguments``. ``call_id`` is the id of a call, empty where any id will do. ``tokens`` are those
    of its content, where they are requested.
    """

    content: str = ""
    reasoning: str = ""
    tool: int | None = None
    name: str | None = None
    arguments: str = ""
    call_id: str = ""
    tokens: tuple[TokenEvent, ...] = ()


class OutputParser(Protocol):
    """Reads the tokens of one output in order. It never raises: what has no form is content."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the content: what comes behind it is of no use."""
        ...

    @property
    def in_content(self) -> bool:
        """Whether content stands at this place of the output."""
        ...

    def push(self, token_id: int) -> list[Delta]:
        """What became complete with a token."""
        ...

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """Return what was held back, once no more tokens come.

        Of an output that a limit ``truncated``, the beginning of a call is left out.
        """
        ...


class TextParser:
    """Every token is content."""

    in_content = True

    def __init__(self, decode: Decode, stop: Stop) -> None:
        self._text = TextStream(decode, stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._text.stopped

    def push(self, token_id: int) -> list[Delta]:
        """The text that the token completes."""
        text = self._text.push(token_id)
        return [Delta(text)] if text else []

    def finish(self, *, truncated: bool = False) -> list[Delta]:
        """Return the rest of the text."""
        del truncated
        text = self._text.finish()
        return [Delta(text)] if text else []
