"""The shapes of models as an engine's manifest holds them: targets of every family, and drafts."""

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
    """Rotary embedding of a model: as its own config gives it.

    ``width`` values at the start of a head turn, None: all. In the checkpoint the two values of a
    pair stand side by side (``interleaved``) or half of the width apart; in engines always the
    latter.
    """

    theta: float
    scaling: RopeScaling | None = None
    width: int | None = None
    interleaved: bool = False

    @property
    def kind(self) -> str:
        """The kind of scaling in one word, ``none`` without."""
        return "none" if self.scaling is None else self.scaling.kind

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        scaled = isinstance(self.scaling, YarnScaling | LongRopeScaling)
        return self.scaling.attention_factor if scaled else 1.0  # type: ignore[union-attr]

    def up_to(self, longest: int) -> Rope:
        """The same for sequences of up to this length, on which some scalings depend."""
        if not isinstance(self.scaling, ByLength):
            return self
        return replace(self, scaling=replace(self.scaling, longest=longest))


@dataclass(frozen=True)
class Norm:
    """RMSNorm; ``rounding`` to the activations' type stands before or after its weight."""

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
    """Constant factors on the residual stream and the logits (Granite's µP).

    ``embedding`` multiplies embedded tokens, ``residual`` what each sublayer adds to the stream.
    The head's logits are divided by ``logits_divisor``; then they are ``c · tanh(logits / c)`` with
    ``logits_cap`` c, 0: unchanged.
    """

    FEATURE: ClassVar[str] = "multipliers"
    embedding: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = field(default=0.0, metadata=of_feature("logits_cap"))


@dataclass(frozen=True, kw_only=True)
class WindowHeads:
    """KV heads, and the width of all heads, of layers with a window."""

    FEATURE: ClassVar[str] = "window_heads"
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What each layer reads of the token beside the stream: ``width`` values (Gemma 4 E2B, E4B).

    They are the mean, but for a factor, of a row of a table [vocab, layers · width] and of a
    normed projection of the embedded token.
    """

    FEATURE: ClassVar[str] = "layer_inputs"
    width: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """What attention has beside its projections' weights.

    ``sinks``: a logit per query head joins the softmax's denominator. ``qk_norm``: queries and keys
    are normed before they turn, head by head with one weight, or over all heads together.
    ``scale`` multiplies the scores, None: ``head_dim^-½``. ``query_growth`` multiplies queries
    after they turn. ``output_gate``: the sigmoid of a further projection multiplies what attention
    gives, before the output's projection. ``value_norm``: values are normed head by head, without
    a weight. ``keys_as_values``: in layers without a window values are the projected keys, before
    their norm and rotation.
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
    """Linear attention by the gated delta rule, behind a convolution of ``taps`` inputs.

    A layer's state has a matrix of ``key_width`` × ``value_width`` for each value head. Value head
    h reads key head ⌊h · key_heads / value_heads⌋.
    """

    FEATURE: ClassVar[str] = "gated_delta"
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.values

    @property
    def values(self) -> int:
        """Values of all heads, which is the width of the layer's output."""
        return self.value_heads * self.value_width

    @property
    def row_width(self) -> int:
        """What a row brings to the state: the convolution's inputs, and two gates a value head."""
        return self.channels + 2 * self.value_heads


@dataclass(frozen=True)
class IndexerGeometry:
    """Shape of the indexers (DSA-lite) of ``layers``: query heads of one width, one key head.

    ``weighted``: each head has a weight of its own at every token. ``top_k`` and ``threshold`` are
    what the checkpoint's config names, None where it does not.
    """

    layers: tuple[int, ...]
    heads: int
    width: int
    weighted: bool
    top_k: int | None = None
    threshold: int | None = None


@dataclass(frozen=True)
class MlaGeometry:
    """Sizes of MLA with decoupled RoPE; ``q_lora_rank`` None where queries have no latent.

    ``scale`` multiplies the scores: ``(nope_dim + rope_dim)^-½``, times YaRN's factors where a
    model has them. ``norm`` is that of the latents.
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
        """Values of a token in the cache: its latent, and the rotated key of all heads."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class TargetGeometry:
    """Shape of the target model.

    ``norm`` is that of layers, the last one's included. Layer i has the feed-forward
    ``feed_forwards[layer_feed_forwards[i]]``; no two of ``feed_forwards`` are equal.
    ``sliding_window`` is 0 where no layer has one. ``tied_head``: the embedding is the head's
    weight too.
    ``latent_dims`` is, for every layer, how many values of a latent stand in its keys' and values'
    place (MLA), 0 where there is none; empty where no layer has one. ``indexer`` is that of
    the layers that choose what they attend to, None where none does. ``mla`` is that of a model
    which was made with latents, None where they came later (MLA-lite); its ``head_dim`` and
    ``kv_heads`` are those of the absorbed form, one head as wide as an entry of the cache.
    ``dtype`` is how the engine stores the projections and the head, None as bf16 or fp32.
    ``norm_places`` says whether a layer norms what attention and feed-forward read, what they
    give, or both. ``unrotated_layers`` have no RoPE. ``window_rope`` is that of layers with a
    window where it differs from ``rope``. ``gated_delta`` is that of the layers of linear
    attention, None where there are none. ``window_heads`` are those of layers with a window where
    they differ from ``kv_heads`` and ``head_dim``. The last ``shared_caches`` layers have neither
    keys nor values: they read those of the last layer before them of their type.
    ``layer_scale``: each layer multiplies the stream by a number of its own.
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
        """The layers of linear attention, which keep a state instead of keys and values."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    def feed_forward(self, layer: int) -> FeedForward:
        """The feed-forward of this layer."""
        return self.feed_forwards[self.layer_feed_forwards[layer]]

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of this layer, if it turns at all."""
        windowed = self.layer_types[layer] == "sliding_attention"
        return self.window_rope if windowed and self.window_rope is not None else self.rope

    def up_to(self, longest: int) -> TargetGeometry:
        """The same for sequences of up to this length."""
        window = None if self.window_rope is None else self.window_rope.up_to(longest)
        return replace(self, rope=self.rope.up_to(longest), window_rope=window)

    def heads_of(self, layer: int) -> WindowHeads:
        """The KV heads and the head width of this layer."""
        if self.window_heads is not None and self.layer_types[layer] == "sliding_attention":
            return self.window_heads
        return WindowHeads(kv_heads=self.kv_heads, head_dim=self.head_dim)

    @property
    def caching_layers(self) -> range:
        """The layers before those of ``shared_caches``."""
        return range(self.layers - self.shared_caches)

    def cache_layer(self, layer: int) -> int:
        """The layer whose keys and values this one reads; its own number where it has some."""
        if layer in self.caching_layers:
            return layer
        kind = self.layer_types[layer]
        return max(i for i in self.caching_layers if self.layer_types[i] == kind)

    @property
    def moe(self) -> MoeFeedForward | None:
        """The routed experts of the first layer that has some, None where no layer has."""
        routed = map(routed_part, self.feed_forwards)
        return next((part for part in routed if part is not None), None)
