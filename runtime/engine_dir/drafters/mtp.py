"""MTP layers in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specbuild.runtime.engine_dir.drafters.record import (
    DraftDefaults,
    Facts,
    ModelRecord,
    group_names,
)
from specbuild.runtime.engine_dir.features import of_feature, one_of
from specbuild.runtime.engine_dir.feed_forward import WEIGHT_STORAGES, FeedForward
from specbuild.runtime.engine_dir.geometry import MlaGeometry, Rope


@dataclass(frozen=True)
class MtpGeometry(DraftDefaults):
    """Shape of an MTP layer, which drafts by recurrence: it reads the normed state and a token.

    It is a block of the target's kind, with the target's embedding and head. One without ``mla``
    caches keys and values, ``kv_heads`` of ``key_width`` each. ``aux_layers`` is the target's last
    layer. ``dtype`` is as in :class:`Eagle3Geometry`.
    """

    FEATURE: ClassVar[str] = "mtp"
    architecture: str
    hidden: int
    vocab: int
    q_heads: int
    mla: MlaGeometry | None
    feed_forward: FeedForward
    rms_eps: float
    rope: Rope
    aux_layers: tuple[int, ...]
    max_positions: int
    dtype: str | None = field(default=None, metadata=one_of(WEIGHT_STORAGES))
    kv_heads: int = field(default=1, metadata=of_feature("mtp_keys_values"))
    key_width: int = field(default=0, metadata=of_feature("mtp_keys_values"))

    @property
    def layers(self) -> int:
        """One."""
        return 1

    @property
    def latent_dims(self) -> tuple[int, ...]:
        """As a target's: what its one layer caches of a token, empty where keys and values are."""
        return () if self.mla is None else (self.mla.entry_width,)

    @property
    def head_dim(self) -> int:
        """How wide a head is; with MLA that of the absorbed form."""
        return self.key_width if self.mla is None else self.mla.entry_width

    @property
    def rotated(self) -> int:
        """As an EAGLE3 draft's: how many values of a head, or of an entry of the cache, turn."""
        if self.mla is not None:
            return self.mla.rope_dim
        return self.rope.width or self.head_dim

    @property
    def sliding_window(self) -> int:
        """None."""
        return 0

    @property
    def d2t_form(self) -> Literal["identity"]:
        """It drafts tokens of the target's vocabulary."""
        return "identity"

    @property
    def window_obstacle(self) -> str:
        """See :class:`DraftGeometry`."""
        return "an MTP layer"

    def facts(self) -> Facts:
        """See :class:`DraftGeometry`."""
        return (("kind", "MTP layer of the model"),)


@dataclass(frozen=True, kw_only=True)
class MtpRecord(ModelRecord):
    """An MTP layer of the target's own checkpoint, run as an EAGLE3 draft is."""

    FEATURE: ClassVar[str] = "mtp"
    BUILD_ARGUMENT: ClassVar[str | None] = "mtp"
    kind: Literal["mtp"] = "mtp"
    cache_group: str = field(metadata=one_of(group_names("mtp")))
    geometry: MtpGeometry
