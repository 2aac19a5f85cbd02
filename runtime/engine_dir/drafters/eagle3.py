"""EAGLE3 drafts in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specbuild.runtime.engine_dir.drafters.record import (
    DraftDefaults,
    Facts,
    ModelRecord,
    group_names,
)
from specbuild.runtime.engine_dir.features import of_feature, one_of
from specbuild.runtime.engine_dir.feed_forward import WEIGHT_STORAGES
from specbuild.runtime.engine_dir.geometry import AttentionParts, MlaGeometry, Rope


@dataclass(frozen=True)
class Eagle3Geometry(DraftDefaults):
    """Shape of an EAGLE3 draft; it reads the outputs of ``aux_layers`` of the target (0-based).

    Layers after the first are blocks on the residual stream, which do not read the embedding.

    ``d2t_form`` is the form of ``d2t`` in the checkpoint; an engine always stores offsets.
    ``norm_before_fc`` is one norm over the concatenated states, ``fc_norm`` one norm per state.
    ``dtype`` is the storage of the projections' weights in the engine, None before the build.
    ``attention`` has the optional parts of the attention, such as biases. ``mlp_bias``: the MLP has
    biases. ``mla`` is set for a draft that caches latents; ``head_dim`` and ``kv_heads`` are then
    those of the absorbed form, as in a target.
    """

    architecture: str
    hidden: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rms_eps: float
    rope: Rope
    aux_layers: tuple[int, ...]
    max_positions: int | None
    d2t_form: Literal["offsets", "identity", "map"]
    sliding_window: int
    own_embedding: bool
    own_head: bool
    norm_before_fc: bool
    input_width: Literal["embedding_and_hidden", "hidden"]
    norm_before_residual: bool
    norm_output: bool
    fc_norm: bool = False
    dtype: str | None = field(default=None, metadata=one_of(WEIGHT_STORAGES))
    attention: AttentionParts = field(default=AttentionParts(), metadata=of_feature("draft_parts"))
    mlp_bias: bool = field(default=False, metadata=of_feature("draft_parts"))
    layers: int = field(default=1, metadata=of_feature("draft_layers"))
    mla: MlaGeometry | None = field(default=None, metadata=of_feature("draft_mla"))

    @property
    def latent_dims(self) -> tuple[int, ...]:
        """The width of each layer's cached latent; empty if the draft caches keys and values."""
        return () if self.mla is None else (self.mla.entry_width,) * self.layers

    @property
    def rotated(self) -> int:
        """The number of values of a head, or of a cached latent, to which RoPE applies."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def facts(self) -> Facts:
        """See :class:`DraftGeometry`."""
        return (("layers, hidden, inner", f"{self.layers}, {self.hidden}, {self.inner}"),)


@dataclass(frozen=True, kw_only=True)
class Eagle3Record(ModelRecord):
    """An EAGLE3 draft in an engine. It runs level by level."""

    kind: Literal["eagle3"] = "eagle3"
    cache_group: str = field(metadata=one_of(group_names("eagle3")))
    geometry: Eagle3Geometry
