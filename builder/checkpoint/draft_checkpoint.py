"""The result of reading a draft, for any family."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP, DraftGeometry, ModelRecord


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft that passed the audit and fits its target.

    Tensors have the names of the family's modules, for an EAGLE3 draft ``midlayer.*``,
    ``fc.weight``, …; ``d2t`` has offsets; ``t2d`` is omitted after its check. ``record`` is the
    manifest's record of the draft; its ``ROLES`` are its graphs.
    """

    geometry: DraftGeometry
    tensors: dict[str, SourceTensor]
    warnings: tuple[str, ...]
    record: type[ModelRecord]

    def cache_group(self, place: int) -> str:
        """Return the record of an engine's draft number ``place``, with its names of roles and
        weights.
        """
        return DRAFT_GROUP if place == 0 else self.record.kind
