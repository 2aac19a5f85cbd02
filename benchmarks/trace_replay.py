"""Replays a trace of ``specbuild serve --trace FILE``: the owners of each page, at every line."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Replay:
    """The state of a trace: the owners of every used page, and counts of events."""

    pages: dict[str, int] = field(default_factory=dict)
    held: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    by_group: Counter[str] = field(default_factory=Counter)
    by_owner: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    admitted: set[int] = field(default_factory=set)
    most_held: dict[str, int] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        """Apply a line; ValueError if it contradicts those before it."""
        event = line["event"]
        self.events[event] += 1
        if event == "start":
            self.pages = line["pages"]
            self.most_held = dict.fromkeys(self.pages, 0)
        elif event == "admit":
            expect(line["owner"] not in self.admitted, "an owner is admitted twice")
            self.admitted.add(line["owner"])
        elif event in ("install", "share", "release"):
            self._move(line)
        elif event in ("preempt", "finish", "abort"):
            expect(not self.by_owner.pop(line["owner"], 0), "an owner that ended holds pages")
        else:
            raise ValueError(f"a trace with event {event!r} cannot be replayed")

    def _move(self, line: dict[str, Any]) -> None:
        group, owner = line["group"], line["owner"]
        for page in line["pages"]:
            owners = self.held.setdefault((group, page), set())
            before = bool(owners)
            if line["event"] == "release":
                expect(owner in owners, f"page {page} comes back from {owner}, {owners} held it")
                owners.remove(owner)
                self.by_owner[owner] -= 1
            else:
                expect(owner in self.admitted, "an owner was not admitted")
                expect(owner not in owners, f"{owner} gets page {page} twice")
                expect(line["event"] == "share" or not before, f"page {page} is given away twice")
                owners.add(owner)
                self.by_owner[owner] += 1
            self.by_group[group] += bool(owners) - before
            if not owners:
                del self.held[group, page]
        held = self.by_group[group]
        self.most_held[group] = max(self.most_held[group], held)
        whole = self.pages[group]
        expect(line["free"] + held == whole, f"{line['free']} free + {held} held, not {whole}")


def expect(true: bool, otherwise: str) -> None:
    """Raise ValueError unless ``true``."""
    if not true:
        raise ValueError(otherwise)


def replay(lines: Iterable[str], *, ended: bool = True) -> Replay:
    """Replay all lines; ValueError names the first wrong one. ``ended``: no page may be in use."""
    state = Replay()
    for number, line in enumerate(lines, 1):
        try:
            state.take(json.loads(line))
        except (ValueError, KeyError) as error:
            raise ValueError(f"line {number}: {error}: {line.strip()}") from error
    expect(not ended or not state.held, f"{len(state.held)} pages are held at the end")
    return state


def main() -> None:
    """Print a summary of a trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    with parser.parse_args().trace.open() as lines:
        result = replay(lines)
    print(json.dumps({"events": dict(result.events), "most_held": result.most_held}, indent=1))


if __name__ == "__main__":
    main()
