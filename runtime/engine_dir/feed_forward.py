"""The feed-forwards of models in a manifest: dense ones and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from specbuild.runtime.engine_dir.features import FeatureOf, of_feature, one_of

# The storage types of weights; a type that was added later names its feature.
WEIGHT_STORAGES: FeatureOf = {"fp32": None, "bf16": None, "fp8": None, "mxfp4": None}


@dataclass(frozen=True, kw_only=True)
class Swiglu:
    """``silu(gate) · up``."""

    kind: Literal["swiglu"] = "swiglu"


@dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
    """GPT-OSS's ``gate · sigmoid(alpha · gate) · (up + 1)``, gate and up clamped at ``limit``."""

    kind: Literal["swiglu_clamped"] = "swiglu_clamped"
    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Geglu:
    """``gelu(gate) · up`` with GELU's tanh approximation."""

    FEATURE: ClassVar[str] = "geglu"
    kind: Literal["geglu_tanh"] = "geglu_tanh"


Activation: TypeAlias = Swiglu | ClampedSwiglu | Geglu


@dataclass(frozen=True, kw_only=True)
class DenseFeedForward:
    """Gate and up [inner, hidden], an activation, and down [hidden, inner]."""

    kind: Literal["dense"] = "dense"
    inner: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoeFeedForward:
    """A router and ``experts`` of width ``inner``; each token uses ``experts_per_token`` of them.

    ``storage`` is the checkpoint's storage type of the experts' weights. ``gating`` computes
    weights from logits. ``choice_bias`` [experts] is added for the selection of experts, but not to
    their weights. Each token selects from ``groups_chosen`` of ``groups`` of experts, those with
    the best ``group_score``: the sum of a group's two best scores, or its best score. The weights
    are multiplied by ``scaling``, and with ``expert_scale`` by a factor per expert [experts].
    """

    kind: Literal["moe"] = "moe"
    experts: int
    experts_per_token: int
    inner: int
    storage: str = field(metadata=one_of(WEIGHT_STORAGES))
    activation: Activation
    gating: Literal["softmax_selected", "softmax_topk", "sigmoid", "sigmoid_norm"]
    router_bias: bool = False
    choice_bias: bool = False
    bias: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: Literal["sum_of_two", "max"] = "sum_of_two"
    scaling: float = 1.0
    expert_scale: bool = field(default=False, metadata=of_feature("expert_scale"))


@dataclass(frozen=True, kw_only=True)
class BothFeedForward:
    """The sum of routed experts and a dense feed-forward for all tokens (shared experts).

    With ``gated`` the sigmoid of a projection to one value multiplies the dense output.
    """

    kind: Literal["both"] = "both"
    dense: DenseFeedForward
    moe: MoeFeedForward
    gated: bool = field(default=False, metadata=of_feature("shared_gate"))
    normed_apart: bool = field(default=False, metadata=of_feature("normed_apart"))


FeedForward: TypeAlias = DenseFeedForward | MoeFeedForward | BothFeedForward


def routed_part(feed_forward: FeedForward) -> MoeFeedForward | None:
    """Return the routed experts of a layer's feed-forward, or None if it has none."""
    if isinstance(feed_forward, BothFeedForward):
        return feed_forward.moe
    return feed_forward if isinstance(feed_forward, MoeFeedForward) else None


def distinct_feed_forwards(
    layers: Sequence[FeedForward],
) -> tuple[tuple[FeedForward, ...], tuple[int, ...]]:
    """Return a target's ``feed_forwards`` and ``layer_feed_forwards``, given one per layer."""
    distinct = tuple(dict.fromkeys(layers))
    return distinct, tuple(distinct.index(layer) for layer in layers)
