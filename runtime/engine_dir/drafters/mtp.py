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
    """Shape of an MTP layer, which drafts one level per run from a normed state and a token.

    The layer has the structure of a target's layer, and the target's embedding and head. Without
    ``mla`` it caches keys and values of ``kv_heads`` heads, each of ``key_width`` values.
    ``aux_layers`` is the target's last layer. ``dtype`` is as in :class:`Eagle3Geometry`.
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
        """1, since an MTP draft has one layer."""
        return 1

    @property
    def latent_dims(self) -> tuple[int, ...]:
        """The width of the layer's cached latent; empty if the layer caches keys and values."""
        return () if self.mla is None else (self.mla.entry_width,)

    @property
    def head_dim(self) -> int:
        """The width of a head; with MLA, of a head in the absorbed form."""
        return self.key_width if self.mla is None else self.mla.entry_width

    @property
    def rotated(self) -> int:
        """The number of values of a head, or of a cached latent, to which RoPE applies."""
        if self.mla is not None:
            return self.mla.rope_dim
        return self.rope.width or self.head_dim

    @property
    def sliding_window(self) -> int:
        """0, since the layer has no sliding window."""
        return 0

    @property
    def d2t_form(self) -> Literal["identity"]:
        """``identity``, since the layer has the target's vocabulary."""
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
    """An MTP layer of the target's checkpoint. It runs level by level, as an EAGLE3 draft does."""

    FEATURE: ClassVar[str] = "mtp"
    BUILD_ARGUMENT: ClassVar[str | None] = "mtp"
    kind: Literal["mtp"] = "mtp"
    cache_group: str = field(metadata=one_of(group_names("mtp")))
    geometry: MtpGeometry
