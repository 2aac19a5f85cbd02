"""The geometries that have a name, and the drafts that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specbuild.builder.checkpoint.rope import yarn_attention_factor
from specbuild.builder.families.eagle3.checkpoint import default_taps
from specbuild.runtime.engine_dir.manifest import DraftGeometry, Rope, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class DraftSizes:
    """What of a draft does not follow from its target."""

    vocab: int
    inner: int


@dataclass(frozen=True)
class NamedGeometry:
    """A target with all of its layers, its padding token, and the sizes of its draft.

    Ids from ``first_special`` on are no text: no prompt holds one and no draft says one.
    """

    target: TargetGeometry
    pad_token_id: int
    first_special: int
    draft: DraftSizes

    def with_layers(self, layers: int | None) -> TargetGeometry:
        """The target cut to its first layers. SpecbuildError if it has not so many."""
        if layers is None:
            return self.target
        most = self.target.layers
        if not 1 <= layers <= most:
            raise SpecbuildError(f"--layers {layers} must lie between 1 and the model's {most}")
        return replace(self.target, layers=layers, layer_types=_alternating(layers))


def _gpt_oss(layers: int, experts: int) -> NamedGeometry:
    target = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=2880,
        vocab=201088,
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        experts=experts,
        experts_per_token=4,
        expert_inner=2880,
        expert_format="mxfp4",
        layer_types=_alternating(layers),
        sliding_window=128,
        max_positions=131072,
        rms_eps=1e-5,
        swiglu_limit=7.0,
        rope=_yarn(factor=32.0, original=4096),
        eos_token_ids=(200002, 199999, 200012),
    )
    return NamedGeometry(target, 199999, 199998, DraftSizes(vocab=32000, inner=17280))


def _tiny() -> NamedGeometry:
    target = TargetGeometry(
        model_type="gpt_oss",
        layers=4,
        hidden=256,
        vocab=4096,
        q_heads=16,
        kv_heads=2,
        head_dim=64,
        experts=16,
        experts_per_token=4,
        expert_inner=128,
        expert_format="mxfp4",
        layer_types=_alternating(4),
        sliding_window=32,
        max_positions=4096,
        rms_eps=1e-5,
        swiglu_limit=7.0,
        rope=_yarn(factor=4.0, original=1024),
        eos_token_ids=(4094, 4093),
    )
    return NamedGeometry(target, 4095, 4093, DraftSizes(vocab=1536, inner=512))


GEOMETRIES: Mapping[str, Callable[[], NamedGeometry]] = {
    "gpt-oss-20b": lambda: _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": lambda: _gpt_oss(layers=36, experts=128),
    "tiny": _tiny,
}


def named_geometry(name: str) -> NamedGeometry:
    """SpecbuildError for a name that is not known."""
    if name not in GEOMETRIES:
        raise SpecbuildError(f"--geometry {name} is not known; choose {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]()


def draft_geometry(target: TargetGeometry, sizes: DraftSizes) -> DraftGeometry:
    """The draft of a target: its attention and its rotary embedding are the target's."""
    return DraftGeometry(
        architecture="LlamaForCausalLMEagle3",
        hidden=target.hidden,
        vocab=sizes.vocab,
        q_heads=target.q_heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        inner=sizes.inner,
        rms_eps=1e-5,
        rope=target.rope,
        taps=default_taps(target.layers),
        max_positions=target.max_positions,
        d2t_form="offsets",
        sliding_window=0,
        own_embedding=False,
        own_head=True,
        norm_before_fc=False,
        input_width="embedding_and_hidden",
        norm_before_residual=False,
        norm_output=False,
    )


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple((SLIDING, FULL)[layer % 2] for layer in range(layers))


def _yarn(factor: float, original: int) -> Rope:
    return Rope(
        theta=150000.0,
        scaling="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        attention_factor=yarn_attention_factor(factor),
    )
