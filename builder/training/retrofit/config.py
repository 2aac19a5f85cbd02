"""Options of a retrofit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbuild.builder.training.retrofit.layer_list import parse_layers
from specbuild.runtime.errors import SpecbuildError


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
