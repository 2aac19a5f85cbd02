"""What rendering a chat template may take: statements, text and time, counted as it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from time import thread_time
from typing import Any

MAX_SOURCE_BYTES = 1 << 17
MAX_STEPS = 1 << 20
MAX_VALUE_CHARS = 1 << 22
MAX_MADE_CHARS = 1 << 25
MAX_COMPARED_CHARS = 1 << 31
MAX_SECONDS = 2.0
# Steps from one look at the clock to the next.
_STEPS_A_LOOK = 64
MAX_INT_BITS = 4096
MAX_COUNT = 1 << 16
# Most characters that one takes inside of a list's text or JSON, as \\U0001f600 or \\ud83d\\ude00.
_ESCAPED = 12


class TemplateOverBoundsError(Exception):
    """A template does more than any chat needs."""


class Meter:
    """Counts what one rendering takes; raises TemplateOverBoundsError beyond the bounds."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A rendering begins."""
        self._steps = self._chars = self._compared = self._looked_at = 0
        self._deadline_s = thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """So many statements run, or so many elements of a list are made or walked."""
        self._steps += count
        if self._steps > MAX_STEPS:
            raise TemplateOverBoundsError(f"it takes more than {MAX_STEPS} steps")
        if self._steps - self._looked_at >= _STEPS_A_LOOK:
            self._looked_at = self._steps
            if thread_time() > self._deadline_s:
                raise TemplateOverBoundsError(f"it computes for more than {MAX_SECONDS:g} s")

    def text(self, chars: int) -> None:
        """A text of so many characters is about to be made."""
        self._chars += chars
        if chars > MAX_VALUE_CHARS or self._chars > MAX_MADE_CHARS:
            raise TemplateOverBoundsError(
                f"it makes a text of more than {MAX_VALUE_CHARS} characters, or more than "
                f"{MAX_MADE_CHARS} in all"
            )

    def compared(self, chars: int) -> None:
        """So many characters are about to be held against others, in one go that nothing stops."""
        self._compared += chars
        if self._compared > MAX_COMPARED_CHARS:
            raise TemplateOverBoundsError(f"it compares more than {MAX_COMPARED_CHARS} characters")

    def weighed(self, value: Any) -> Any:
        """``value``, which is about to be compared with all that it holds."""
        for part in self.parts(value):
            if isinstance(part, str):
                self.compared(len(part))
        return value

    def made(self, value: Any) -> Any:
        """``value``, which now takes memory of its own; what a generator gives is counted too."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, int):
            check_int(value)
        elif isinstance(value, list | tuple | dict | set):
            self.step(len(value))
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def walked(self, values: Iterable[Any]) -> list[Any]:
        """The values of something that is walked through, each counted."""
        if isinstance(values, Sized):
            self.step(len(values))
            return list(values)
        return list(self._counted(iter(values)))

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value

    def text_size(self, value: Any) -> int:
        """At least as many characters as the text of ``value`` has, be it nested."""
        if isinstance(value, str):
            return len(value)
        size = 0
        for item in self.parts(value):
            size += 32
            if isinstance(item, str):
                size += _ESCAPED * len(item)
            elif isinstance(item, int):
                size += item.bit_length()
            if size > MAX_VALUE_CHARS:
                break
        return size

    def parts(self, value: Any) -> Iterator[Any]:
        """``value`` and all that it holds, as often as it does; each is a step."""
        left = [value]
        while left:
            item = left.pop()
            self.step()
            yield item
            if isinstance(item, dict):
                left += (*item.keys(), *item.values())
            elif isinstance(item, Iterable) and not isinstance(item, str | Iterator | range):
                left.extend(item)  # += asks an undefined value for its own addition
            else:
                left.extend(_attributes(item))

    def nested(self, value: Any) -> Any:
        """``value``, a list or the like: comparing it takes a step for all that it holds."""
        for _ in self.parts(value):
            pass
        return value


def check_int(value: int) -> None:
    """Raises TemplateOverBoundsError for a number that takes long to compute with."""
    if value.bit_length() > MAX_INT_BITS:
        raise TemplateOverBoundsError(f"it computes with numbers of more than {MAX_INT_BITS} bits")


def check_count(value: Any) -> None:
    """Raises TemplateOverBoundsError for a width or number of parts that no chat has."""
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise TemplateOverBoundsError(f"it asks for more than {MAX_COUNT} of something")


def _attributes(item: Any) -> Iterable[Any]:
    """What a namespace holds, which its text shows."""
    held = getattr(item, "_Namespace__attrs", None)
    return (held,) if isinstance(held, dict) else ()
