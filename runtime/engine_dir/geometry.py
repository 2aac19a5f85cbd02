"""The shapes of models in a manifest: targets of all families, and drafts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from specbuild.runtime.engine_dir.features import FeatureOf, of_feature, one_of
from specbuild.runtime.engine_dir.feed_forward import (
    WEIGHT_STORAGES,
    FeedForward,
    MoeFeedForward,
    routed_part,
)
from specbuild.runtime.engine_dir.rope_scaling import (
    ByLength,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

LINEAR_ATTENTION = "linear_attention"
LAYER_TYPES: FeatureOf = {
    "full_attention": None,
    "sliding_attention": None,
    LINEAR_ATTENTION: "gated_delta",
}
NormPlaces: TypeAlias = Literal["inputs", "outputs", "both"]


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model, as its config states it.

    RoPE applies to the first ``width`` values of a head, None for all. In the checkpoint the two
    values of a pair are adjacent (``interleaved``) or half of the width apart; in engines they are
    always half of the width apart.
    """

    theta: float
    scaling: RopeScaling | None = None
    width: int | None = None
    interleaved: bool = False

    @property
    def kind(self) -> str:
        """The kind of scaling in one word, or ``none``."""
        return "none" if self.scaling is None else self.scaling.kind

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        scaled = isinstance(self.scaling, YarnScaling | LongRopeScaling)
        return self.scaling.attention_factor if scaled else 1.0  # type: ignore[union-attr]

    def up_to(self, longest: int) -> Rope:
        """Return the embedding for sequences of up to this length; some scalings depend on it."""
        if not isinstance(self.scaling, ByLength):
            return self
        return replace(self, scaling=replace(self.scaling, longest=longest))


@dataclass(frozen=True)
class Norm:
    """RMSNorm; values are rounded to the activations' type before or after the weight."""

    eps: float
    rounding: Literal["before_weight", "after_weight"]


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A factor of queries by their position: ``1 + beta · ln(1 + ⌊position / original⌋)``."""

    FEATURE: ClassVar[str] = "query_growth"
    beta: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors of the residual stream and the logits (Granite's µP).

    ``embedding`` multiplies embedded tokens, ``residual`` the output of each sublayer. The head's
    logits are divided by ``logits_divisor``. With ``logits_cap`` c > 0 they then become ``c ·
    tanh(logits / c)``.
    """

    FEATURE: ClassVar[str] = "multipliers"
    embedding: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = field(default=0.0, metadata=of_feature("logits_cap"))


@dataclass(frozen=True, kw_only=True)
class WindowHeads:
    """The number of KV heads and the head width of layers with a window."""

    FEATURE: ClassVar[str] = "window_heads"
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """An input of each layer besides the residual stream: ``width`` values (Gemma 4 E2B, E4B).

    Up to a factor, it is the mean of a row of a table [vocab, layers · width] and of a normed
    projection of the embedded token.
    """

    FEATURE: ClassVar[str] = "layer_inputs"
    width: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """Optional parts of attention.

    ``sinks``: the softmax's denominator includes a logit per query head. ``qk_norm``: queries and
    keys are normed before RoPE, per head with one weight, or over all heads together. ``scale``
    multiplies the scores, by default ``head_dim^-½``. ``query_growth`` multiplies queries after
    RoPE. ``output_gate``: the sigmoid of a further projection multiplies the output of attention
    before the output projection. ``value_norm``: values are normed per head, without a weight.
    ``keys_as_values``: in layers without a window, values are the projected keys before their norm
    and RoPE.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    scale: float | None = field(default=None, metadata=of_feature("attention_scale"))
    query_growth: QueryGrowth | None = field(default=None, metadata=of_feature("query_growth"))
    output_gate: bool = field(default=False, metadata=of_feature("output_gate"))
    value_norm: bool = field(default=False, metadata=of_feature("value_norm"))
    keys_as_values: bool = field(default=False, metadata=of_feature("keys_as_values"))


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule, after a convolution of ``taps`` inputs.

    The state of a layer is a matrix of ``key_width`` × ``value_width`` for each value head. Value
    head h reads key head ⌊h · key_heads / value_heads⌋.
    """

    FEATURE: ClassVar[str] = "gated_delta"
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @property
    def channels(self) -> int:
        """The number of inputs of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.values

    @property
    def values(self) -> int:
        """The number of values of all heads, which is the width of the layer's output."""
        return self.value_heads * self.value_width

    @property
    def row_width(self) -> int:
        """The values of a row that change the state: inputs, and two gates per value head."""
        return self.channels + 2 * self.value_heads


@dataclass(frozen=True)
class IndexerGeometry:
    """The indexers (DSA-lite) of ``layers``: query heads of one width, and one key head.

    ``weighted``: each head has a weight per token. ``top_k`` and ``threshold`` are from the
    checkpoint's config, None if it has none.
    """

    layers: tuple[int, ...]
    heads: int
    width: int
    weighted: bool
    top_k: int | None = None
    threshold: int | None = None


@dataclass(frozen=True)
class MlaGeometry:
    """The sizes of MLA with decoupled RoPE; ``q_lora_rank`` is None without a query latent.

    ``scale`` multiplies the scores: ``(nope_dim + rope_dim)^-½``, times YaRN's factors if the model
    has them. ``norm`` is the norm of the latents.
    """

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    scale: float
    norm: Norm
    q_lora_rank: int | None = None

    @property
    def entry_width(self) -> int:
        """The cached values per token: its latent, and the rotated key that all heads share."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class TargetGeometry:
    """The shape of the target model.

    ``norm`` is the norm of layers and of the last hidden state. Layer i has the feed-forward
    ``feed_forwards[layer_feed_forwards[i]]``; all of ``feed_forwards`` differ. ``sliding_window``
    is 0 if no layer has one. ``tied_head``: the embedding is also the head's weight.
    ``latent_dims`` is the width of each layer's latent, which replaces keys and values (MLA): 0 for
    a layer without one, empty if no layer has one. ``indexer`` is the indexers of layers that
    select tokens to attend to, or None. ``mla`` describes a model trained with latents; it is None
    for latents that were added later (MLA-lite). With ``mla``, ``head_dim`` and ``kv_heads`` are
    those of the absorbed form: one head as wide as a cache entry. ``dtype`` is the engine's storage
    of projections and head, None for bf16 or fp32. ``norm_places`` states whether a layer norms the
    inputs of attention and feed-forward, their outputs, or both. ``unrotated_layers`` have no RoPE.
    ``window_rope`` applies to layers with a window if it differs from ``rope``. ``gated_delta``
    describes the layers of linear attention, None if there are none. ``window_heads`` applies to
    layers with a window if it differs from ``kv_heads`` and ``head_dim``. The last
    ``shared_caches`` layers have neither keys nor values: they read those of the last earlier layer
    of their type. ``layer_scale``: each layer multiplies the stream by its own factor.
    """

    model_type: str
    layers: int
    hidden: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    attention: AttentionParts
    norm: Norm
    rope: Rope
    layer_types: tuple[str, ...] = field(metadata=one_of(LAYER_TYPES))
    sliding_window: int
    feed_forwards: tuple[FeedForward, ...]
    layer_feed_forwards: tuple[int, ...]
    max_positions: int
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    latent_dims: tuple[int, ...] = field(default=(), metadata=of_feature("latents"))
    mla: MlaGeometry | None = field(default=None, metadata=of_feature("latents"))
    indexer: IndexerGeometry | None = field(default=None, metadata=of_feature("dsa"))
    dtype: str | None = field(
        default=None, metadata=one_of(WEIGHT_STORAGES) | of_feature("coded_weights")
    )
    norm_places: NormPlaces = field(default="inputs", metadata=of_feature("norm_places"))
    unrotated_layers: tuple[int, ...] = field(default=(), metadata=of_feature("unrotated_layers"))
    window_rope: Rope | None = field(default=None, metadata=of_feature("window_rope"))
    multipliers: Multipliers | None = field(default=None, metadata=of_feature("multipliers"))
    gated_delta: GatedDelta | None = field(default=None, metadata=of_feature("gated_delta"))
    window_heads: WindowHeads | None = field(default=None, metadata=of_feature("window_heads"))
    shared_caches: int = field(default=0, metadata=of_feature("shared_caches"))
    layer_inputs: LayerInputs | None = field(default=None, metadata=of_feature("layer_inputs"))
    layer_scale: bool = field(default=False, metadata=of_feature("layer_scale"))

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers of linear attention, which have a state instead of keys and values."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    def feed_forward(self, layer: int) -> FeedForward:
        """Return the feed-forward of a layer."""
        return self.feed_forwards[self.layer_feed_forwards[layer]]

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary embedding of a layer that is not in ``unrotated_layers``."""
        windowed = self.layer_types[layer] == "sliding_attention"
        return self.window_rope if windowed and self.window_rope is not None else self.rope

    def up_to(self, longest: int) -> TargetGeometry:
        """Return the geometry for sequences of up to this length."""
        window = None if self.window_rope is None else self.window_rope.up_to(longest)
        return replace(self, rope=self.rope.up_to(longest), window_rope=window)

    def heads_of(self, layer: int) -> WindowHeads:
        """Return the number of KV heads and the head width of a layer."""
        if self.window_heads is not None and self.layer_types[layer] == "sliding_attention":
            return self.window_heads
        return WindowHeads(kv_heads=self.kv_heads, head_dim=self.head_dim)

    @property
    def caching_layers(self) -> range:
        """The number of layers before those of ``shared_caches``."""
        return range(self.layers - self.shared_caches)

    def cache_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: usually the layer itself."""
        if layer in self.caching_layers:
            return layer
        kind = self.layer_types[layer]
        return max(i for i in self.caching_layers if self.layer_types[i] == kind)

    @property
    def moe(self) -> MoeFeedForward | None:
        """The routed experts of the first layer that has any, or None."""
        routed = map(routed_part, self.feed_forwards)
        return next((part for part in routed if part is not None), None)
