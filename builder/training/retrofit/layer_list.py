"""Lists of layers as they are typed: ``0-11,15``."""

from __future__ import annotations

import re

from specbuild.runtime.errors import SpecbuildError

_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """The layers that ``text`` names, rising; SpecbuildError if a model of ``count`` lacks one."""
    layers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise SpecbuildError(f"--layers {text}: {part!r} is no layer; write 0-11,15")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise SpecbuildError(f"--layers {text}: {part} is not within 0-{count - 1}")
        layers |= set(range(first, last + 1))
    return tuple(sorted(layers))
