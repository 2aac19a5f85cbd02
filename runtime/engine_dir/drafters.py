"""What proposes tokens in an engine, as its manifest lists it: records of each kind.

An engine may hold several draft models. The first one's roles, weights and cache group have the
plain names; those of another are named after its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from specbuild.runtime.engine_dir.features import FeatureOf, one_of
from specbuild.runtime.engine_dir.geometry import (
    DFlashGeometry,
    DraftGeometry,
    Eagle3Geometry,
    MtpGeometry,
    PEagleGeometry,
)

# The roles of a draft: those that are models, and single ops.
DRAFT_MODEL_ROLES = ("draft_fuse", "draft")
DRAFT_ROLES = (*DRAFT_MODEL_ROLES, "expand", "select")
# Cache groups of draft models: the first one's, then those named after the kind of another.
DRAFT_GROUPS: FeatureOf = {
    "draft": None,
    **dict.fromkeys(("eagle3", "p-eagle", "dflash", "mtp"), "draft_models"),
}


@dataclass(frozen=True, kw_only=True)
class _DraftModel:
    """A draft model in an engine: its cache group, and the roles that only it has.

    ``roles`` are ``ROLES`` as the engine names them, or none where a plan takes the place of graphs
    (``cuda``). The first model's have the plain names, those of another its cache group in front.
    """

    ROLES: ClassVar[tuple[str, ...]] = DRAFT_ROLES
    kind: str
    cache_group: str = field(metadata=one_of(DRAFT_GROUPS))
    roles: tuple[str, ...]

    def role(self, name: str) -> str:
        """The engine's name of one of ``ROLES``."""
        return own_name(self.cache_group, name)


@dataclass(frozen=True, kw_only=True)
class Eagle3Drafter(_DraftModel):
    """An EAGLE3 draft, run level by level."""

    kind: Literal["eagle3"] = "eagle3"
    geometry: Eagle3Geometry


@dataclass(frozen=True, kw_only=True)
class PEagleDrafter(_DraftModel):
    """A P-EAGLE draft, run in one pass."""

    FEATURE: ClassVar[str] = "p_eagle"
    kind: Literal["p-eagle"] = "p-eagle"
    geometry: PEagleGeometry


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(_DraftModel):
    """An MTP layer of the target's own checkpoint, run as an EAGLE3 draft is."""

    FEATURE: ClassVar[str] = "mtp"
    kind: Literal["mtp"] = "mtp"
    geometry: MtpGeometry


@dataclass(frozen=True, kw_only=True)
class DFlashDrafter(_DraftModel):
    """A DFlash draft: one pass over a block."""

    FEATURE: ClassVar[str] = "dflash"
    kind: Literal["dflash"] = "dflash"
    geometry: DFlashGeometry


@dataclass(frozen=True, kw_only=True)
class SuffixDrafter:
    """Suffix decoding: proposes what followed before, without weights, roles or caches.

    Matches have less than ``cache_max_depth`` tokens, proposals up to ``max_tokens``, each accepted
    with ``min_token_prob`` at least by what came true before. Texts of earlier requests are kept
    up to ``cached_tokens`` together.
    """

    FEATURE: ClassVar[str] = "suffix"
    ROLES: ClassVar[tuple[str, ...]] = ()
    cache_group: ClassVar[None] = None
    roles: ClassVar[tuple[str, ...]] = ()
    geometry: ClassVar[None] = None
    kind: Literal["suffix"] = "suffix"
    cache_max_depth: int = 24
    max_tokens: int = 24
    min_token_prob: float = 0.1
    cached_tokens: int = 32768


# What proposes tokens: a union by ``kind``, of models and of what needs none.
ModelDrafter: TypeAlias = Eagle3Drafter | PEagleDrafter | MtpDrafter | DFlashDrafter
Drafter: TypeAlias = ModelDrafter | SuffixDrafter


def own_name(cache_group: str, name: str) -> str:
    """How an engine calls a role, or a weight, of the draft model with this cache group."""
    first, *_ = DRAFT_GROUPS
    return name if cache_group == first else f"{cache_group}.{name}"


def aux_layers_of(drafts: Sequence[DraftGeometry]) -> tuple[int, ...]:
    """The layers that the first of some drafts reads, and those that only others read."""
    found: tuple[int, ...] = ()
    for draft in drafts:
        more = dict.fromkeys(draft.aux_layers) if found else draft.aux_layers
        found += tuple(layer for layer in more if layer not in found)
    return found
