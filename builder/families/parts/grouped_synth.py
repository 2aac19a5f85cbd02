"""Synthetic targets with grouped-query attention: geometries and configurations from sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specbuild.builder.families.family import DraftSizes, NamedGeometry
from specbuild.builder.synth.configs import rope_config
from specbuild.runtime.engine_dir.feed_forward import (
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
    Swiglu,
    distinct_feed_forwards,
)
from specbuild.runtime.engine_dir.geometry import AttentionParts, Norm, Rope, TargetGeometry


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary; ids from ``special`` on are special tokens."""

    size: int
    special: int
    eos: tuple[int, ...]
    pad: int


TINY_VOCABULARY = Vocabulary(4096, 4093, (4094,), 4095)


@dataclass(frozen=True, kw_only=True)
class GroupedSizes:
    """The sizes that differ between geometries; KV heads divide query heads.

    Layer i has the type ``layer_types[i % len(layer_types)]``. ``feed_forward`` is that of all
    layers except ``first_layers``. ``draft_inner`` is the width of a draft's feed-forward.
    """

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    feed_forward: FeedForward
    vocabulary: Vocabulary
    positions: int
    rope: Rope
    eps: float
    draft_inner: int
    attention: AttentionParts = field(default=AttentionParts())
    layer_types: tuple[str, ...] = ("full_attention",)
    window: int = 0
    first_layers: tuple[FeedForward, ...] = ()
    rounding: Literal["before_weight", "after_weight"] = "before_weight"

    def geometry(self, model_type: str, **changes: Any) -> TargetGeometry:
        """Return the target of these sizes; ``changes`` are further fields."""
        types = tuple(
            self.layer_types[layer % len(self.layer_types)] for layer in range(self.layers)
        )
        later = [self.feed_forward] * (self.layers - len(self.first_layers))
        distinct, of_layer = distinct_feed_forwards([*self.first_layers, *later])
        return TargetGeometry(
            model_type=model_type,
            layers=self.layers,
            hidden=self.hidden,
            vocab=self.vocabulary.size,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            attention=self.attention,
            norm=Norm(self.eps, self.rounding),
            rope=self.rope,
            layer_types=types,
            sliding_window=self.window,
            feed_forwards=distinct,
            layer_feed_forwards=of_layer,
            max_positions=self.positions,
            # The head is separate also in small models with tied heads: it defines the next token.
            tied_head=False,
            eos_token_ids=self.vocabulary.eos,
            **changes,
        )


def named(model_type: str, s: GroupedSizes, **changes: Any) -> NamedGeometry:
    """Return the target of these sizes and its draft's; ``changes`` are further fields."""
    vocabulary = s.vocabulary
    draft = DraftSizes(min(32000, vocabulary.size * 3 // 8), s.draft_inner)
    target = s.geometry(model_type, **changes)
    return NamedGeometry(target, vocabulary.pad, vocabulary.special, draft)


def dense(inner: int) -> DenseFeedForward:
    """Return a SwiGLU of this width."""
    return DenseFeedForward(inner=inner, activation=Swiglu())


def routed(count: int, selected: int, inner: int, **parts: Any) -> MoeFeedForward:
    """Return ``count`` SwiGLU experts; by default the softmax is over the selected ones."""
    fields = {"gating": "softmax_selected", **parts}
    return MoeFeedForward(
        experts=count,
        experts_per_token=selected,
        inner=inner,
        storage="bf16",
        activation=Swiglu(),
        **fields,
    )


def tiny_sizes(feed_forward: FeedForward, **changes: Any) -> GroupedSizes:
    """Return three layers that a test can build; ``changes`` are other sizes."""
    sizes: dict[str, Any] = {
        "hidden": 256, "layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 64,
        "feed_forward": feed_forward, "draft_inner": 512, "vocabulary": TINY_VOCABULARY,
        "positions": 4096, "rope": Rope(10000.0), "eps": 1e-5,
    }  # fmt: skip
    return GroupedSizes(**(sizes | changes))


def config_writer(
    architectures: Mapping[str, str],
    own: Callable[[TargetGeometry], dict[str, Any]],
) -> Callable[[TargetGeometry, int], dict[str, Any]]:
    """Return a function that writes ``config.json`` like the releases, with a padding token.

    ``architectures`` are the classes by model type. ``own`` returns the family's own fields.
    """

    def write(g: TargetGeometry, pad_token_id: int) -> dict[str, Any]:
        return {
            "architectures": [architectures[g.model_type]],
            "eos_token_id": list(g.eos_token_ids),
            "head_dim": g.head_dim,
            "hidden_act": "silu",
            "hidden_size": g.hidden,
            "max_position_embeddings": g.max_positions,
            "model_type": g.model_type,
            "num_attention_heads": g.q_heads,
            "num_hidden_layers": g.layers,
            "num_key_value_heads": g.kv_heads,
            "pad_token_id": pad_token_id,
            "rms_norm_eps": g.norm.eps,
            "rope_scaling": rope_config(g.rope),
            "rope_theta": g.rope.theta,
            "tie_word_embeddings": g.tied_head,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": g.vocab,
            **own(g),
        }

    return write
