"""Lists of layers on the command line: ``0-11,15``."""

from __future__ import annotations

import re

from specbuild.runtime.errors import SpecbuildError

_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Return the layers of ``text`` in ascending order; SpecbuildError for layers ≥ ``count``."""
    layers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise SpecbuildError(f"--layers {text}: {part!r} is not a layer; write 0-11,15")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise SpecbuildError(f"--layers {text}: {part} is not within 0-{count - 1}")
        layers |= set(range(first, last + 1))
    return tuple(sorted(layers))
