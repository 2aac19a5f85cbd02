"""Assistant drafts in the manifest: small decoders that read the target's caches (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from specbuild.runtime.engine_dir.drafters.record import (
    DraftDefaults,
    Facts,
    ModelRecord,
    PortContext,
    group_names,
)
from specbuild.runtime.engine_dir.features import one_of
from specbuild.runtime.engine_dir.feed_forward import WEIGHT_STORAGES
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.port_forms import Forms


@dataclass(frozen=True, kw_only=True)
class AssistantGeometry(DraftDefaults):
    """Shape of an assistant, which drafts one level per run and caches nothing.

    ``decoder`` is the shape of its layers. They only have queries: a layer attends to the keys and
    values of the target's last caching layer of its type. ``hidden`` is the target's width, which
    is that of the recurrent state. The embedding of tokens is the target's, the head is its own.
    ``aux_layers`` is the target's last layer. If the vocabulary is split into ``clusters``, the
    head computes the logits of the ``read_clusters`` best ones; 0 and 0 is a plain head. ``dtype``
    is as in :class:`Eagle3Geometry`.
    """

    FEATURE: ClassVar[str] = "gemma4_assistant"
    architecture: str
    hidden: int
    decoder: TargetGeometry
    aux_layers: tuple[int, ...]
    clusters: int
    read_clusters: int
    dtype: str | None = field(default=None, metadata=one_of(WEIGHT_STORAGES))

    @property
    def vocab(self) -> int:
        """The vocabulary, which is the target's."""
        return self.decoder.vocab

    @property
    def q_heads(self) -> int:
        """The number of query heads."""
        return self.decoder.q_heads

    @property
    def kv_heads(self) -> int:
        """The number of KV heads that layers without a window read."""
        return self.decoder.kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a head in layers without a window."""
        return self.decoder.head_dim

    @property
    def rms_eps(self) -> float:
        """The addend of norms."""
        return self.decoder.norm.eps

    @property
    def rope(self) -> Rope:
        """The rotary embedding of layers without a window."""
        return self.decoder.rope

    @property
    def window_rope(self) -> Rope:
        """The rotary embedding of layers with a window."""
        return self.decoder.window_rope or self.decoder.rope

    @property
    def max_positions(self) -> int:
        """The number of positions that the decoder supports."""
        return self.decoder.max_positions

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.decoder.layers

    @property
    def cached_layers(self) -> int:
        """0, since the draft caches nothing."""
        return 0

    @property
    def latent_dims(self) -> tuple[int, ...]:
        """An empty tuple, since the draft has no latents."""
        return ()

    @property
    def mla(self) -> None:
        """None, since the draft has no MLA."""
        return None

    @property
    def sliding_window(self) -> int:
        """0, since the draft's cache group has no window."""
        return 0

    @property
    def d2t_form(self) -> Literal["identity"]:
        """``identity``, since the draft has the target's vocabulary."""
        return "identity"

    def target_layers(self, target: TargetGeometry) -> tuple[int, ...]:
        """See :class:`DraftGeometry`: the last caching layer of each type, in ascending order."""
        kinds = set(self.decoder.layer_types)
        last = {target.layer_types[layer]: layer for layer in target.caching_layers}
        return tuple(sorted(layer for kind, layer in last.items() if kind in kinds))

    def up_to(self, longest: int) -> AssistantGeometry:
        """See :class:`DraftGeometry`."""
        return replace(self, decoder=self.decoder.up_to(longest))

    @property
    def window_obstacle(self) -> str:
        """See :class:`DraftGeometry`."""
        return "a draft without a cache"

    def facts(self) -> Facts:
        """See :class:`DraftGeometry`."""
        clusters = f"{self.read_clusters} of {self.clusters} per token"
        return (
            ("kind", "assistant, which reads the model's caches"),
            ("layers, hidden", f"{self.layers}, {self.decoder.hidden}"),
            *([("clusters", clusters)] if self.clusters else []),
        )


@dataclass(frozen=True, kw_only=True)
class AssistantRecord(ModelRecord):
    """An assistant in an engine. Its cache group has no layers: it counts the ingested tokens."""

    FEATURE: ClassVar[str] = "gemma4_assistant"
    kind: Literal["gemma4-assistant"] = "gemma4-assistant"
    cache_group: str = field(metadata=one_of(group_names("gemma4-assistant")))
    geometry: AssistantGeometry

    def draft_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """See :class:`ModelRecord`: the role writes to no cache."""
        inputs, outputs = super().draft_ports(given)
        return inputs, {name: outputs[name] for name in ("draft_logits", "hidden_out")}
