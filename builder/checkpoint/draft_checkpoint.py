"""What reading a draft gives, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP, DraftGeometry, ModelRecord


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft that passed the audit and fits its target.

    Tensors have the names that the family's modules give them; of an EAGLE3 draft ``midlayer.*``,
    ``fc.weight``, …; ``d2t`` holds offsets; ``t2d``, once checked, is left out. ``record`` is what
    an engine's manifest says of such a draft; its ``ROLES`` are the graphs that it takes.
    """

    geometry: DraftGeometry
    tensors: dict[str, SourceTensor]
    warnings: tuple[str, ...]
    record: type[ModelRecord]

    def cache_group(self, place: int) -> str:
        """That of an engine's draft number ``place``, which names its roles and weights too."""
        return DRAFT_GROUP if place == 0 else self.record.kind
