"""DFlash and JetSpec drafts in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specbuild.runtime.engine_dir.drafters.record import (
    DraftDefaults,
    Facts,
    ModelRecord,
    PortContext,
    group_names,
)
from specbuild.runtime.engine_dir.features import of_feature, one_of
from specbuild.runtime.engine_dir.feed_forward import WEIGHT_STORAGES
from specbuild.runtime.engine_dir.geometry import AttentionParts, Rope
from specbuild.runtime.engine_dir.port_forms import Forms, floats, ints, launch_forms, written


@dataclass(frozen=True, kw_only=True)
class DFlashGeometry(DraftDefaults):
    """Shape of a DFlash draft, which runs one pass over a block of rows.

    The queries of its layers are the rows of the block. The keys come from the target's states and
    from the block. The block is the newest token, followed by ``block_size`` − 1 copies of
    ``mask_token``. In a ``causal`` block (JetSpec) a row attends only to itself and earlier rows.
    Row i drafts level i. With ``from_anchor`` (DSpark) the newest token's row drafts level 1, and
    row i level i + 1. Embedding and head are the target's. ``attention`` and ``dtype`` are as in
    :class:`Eagle3Geometry`.
    """

    FEATURE: ClassVar[str] = "dflash"
    architecture: str
    hidden: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    rms_eps: float
    rope: Rope
    aux_layers: tuple[int, ...]
    max_positions: int | None
    block_size: int
    mask_token: int
    causal: bool
    attention: AttentionParts
    sliding_window: int = 0
    dtype: str | None = field(default=None, metadata=one_of(WEIGHT_STORAGES))
    from_anchor: bool = field(default=False, metadata=of_feature("dflash_anchor"))

    @property
    def first_row(self) -> int:
        """The row of a block that drafts level 1."""
        return 0 if self.from_anchor else 1

    @property
    def block(self) -> int:  # type: ignore[override]
        """See :class:`DraftGeometry`."""
        return self.block_size + 1 - self.first_row

    def block_rows(self, depth: int) -> int:
        """See :class:`DraftGeometry`: a non-causal block runs at full size, as in training."""
        return depth + self.first_row if self.causal else self.block_size

    @property
    def window_obstacle(self) -> str | None:
        """See :class:`DraftGeometry`.

        The kernel for a window computes a row's position from its ancestors. In a non-causal block
        the ancestors include later rows.
        """
        return None if self.causal else "a DFlash draft that is not causal"

    def facts(self) -> Facts:
        """See :class:`DraftGeometry`."""
        kind = "JetSpec, causal" if self.causal else "DFlash, non-causal"
        return (
            ("kind", f"{kind}; blocks of {self.block_size}, mask {self.mask_token}"),
            ("layers, hidden, inner", f"{self.layers}, {self.hidden}, {self.inner}"),
        )

    @property
    def latent_dims(self) -> tuple[int, ...]:
        """An empty tuple, since the draft caches keys and values."""
        return ()

    @property
    def mla(self) -> None:
        """None, since the draft has no MLA."""
        return None

    @property
    def d2t_form(self) -> Literal["identity"]:
        """``identity``, since the draft has the target's vocabulary."""
        return "identity"


@dataclass(frozen=True, kw_only=True)
class DFlashRecord(ModelRecord):
    """A DFlash draft in an engine. Its caches hold keys and values of the target's states."""

    FEATURE: ClassVar[str] = "dflash"
    kind: Literal["dflash"] = "dflash"
    cache_group: str = field(metadata=one_of(group_names("dflash")))
    geometry: DFlashGeometry

    def fuse_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """See :class:`ModelRecord`; the role writes keys and values of target states."""
        inputs = {"captured": self.aux_hidden(given), "positions": ints("T")}
        inputs |= {f"{given.group}.write_slot": ints("T")} | given.pools
        return inputs, written(given.pools)

    def draft_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """See :class:`ModelRecord`: the role reads tokens, but no hidden states."""
        inputs = launch_forms() | given.view | given.pools
        logits = {"draft_logits": floats("R", self.geometry.vocab)}
        return inputs, logits | written(given.pools)
