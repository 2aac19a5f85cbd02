"""P-EAGLE drafts in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.drafters.record import (
    Facts,
    ModelRecord,
    PortContext,
    group_names,
)
from specbuild.runtime.engine_dir.features import one_of
from specbuild.runtime.engine_dir.port_forms import Forms, floats


@dataclass(frozen=True)
class PEagleGeometry(Eagle3Geometry):
    """Shape of a P-EAGLE draft: an EAGLE3 draft that drafts all positions in one causal pass.

    Each row after the root's row reads ``mask_token`` and one learned hidden state. The role
    ``draft_fuse`` outputs this state along with the fused states of the target.
    """

    FEATURE: ClassVar[str] = "p_eagle"
    mask_token: int = field(kw_only=True)

    def mask_rows(self, depth: int) -> int:
        """See :class:`DraftGeometry`: the last ingested row drafts the first level."""
        return depth - 1

    def facts(self) -> Facts:
        """See :class:`DraftGeometry`."""
        return (("kind", f"P-EAGLE, one pass; mask token {self.mask_token}"), *super().facts())


@dataclass(frozen=True, kw_only=True)
class PEagleRecord(ModelRecord):
    """A P-EAGLE draft in an engine. It runs in one pass."""

    FEATURE: ClassVar[str] = "p_eagle"
    kind: Literal["p-eagle"] = "p-eagle"
    cache_group: str = field(metadata=one_of(group_names("p-eagle")))
    geometry: PEagleGeometry

    def fuse_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """See :class:`ModelRecord`; a further output is the hidden state of mask rows."""
        inputs, outputs = super().fuse_ports(given)
        return inputs, outputs | {"mask_hidden": floats(1, self.geometry.hidden)}
