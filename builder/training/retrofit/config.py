"""Options of a retrofit, and lists of layers on the command line: ``0-11,15``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbuild.runtime.errors import SpecbuildError

_PART = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class LatentOptions:
    """Options of ``specbuild retrofit mla``.

    ``layers`` is a list such as ``0-11,15``; None means all. ``tokens`` bounds the calibration
    text, which is read in sequences of ``sequence_length``. ``output`` None means the checkpoint's
    directory, where ``build`` reads it.
    """

    model: Path
    rank: int
    calibration: tuple[Path, ...] = ()
    evaluation: tuple[Path, ...] = ()
    layers: str | None = None
    tokens: int = 16384
    sequence_length: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    output: Path | None = None
    force: bool = False

    def checked_layers(self, count: int, full_rank: int) -> tuple[int, ...]:
        """Return the layers that get latents, of a model with ``count`` layers.

        Raises SpecbuildError for layers or a rank that the model does not have.
        """
        if not 1 <= self.rank <= full_rank:
            raise SpecbuildError(
                f"--rank {self.rank}: keys and values of a layer together have rank {full_rank} at "
                f"most; use 1 to {full_rank}"
            )
        return tuple(range(count)) if self.layers is None else parse_layers(self.layers, count)


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
