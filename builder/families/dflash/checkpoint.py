"""Reads a DFlash draft, and checks that it fits its target."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.rope import describe, read_optional_positions, read_rope
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor, open_directory
from specbuild.builder.families.dflash.config import (
    ARCHITECTURES,
    DFlashConfig,
    is_dspark,
    read_dflash_config,
)
from specbuild.builder.families.parts.tensor_shapes import Shapes, prefixed, swiglu_shapes
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry, DFlashRecord
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

DEFAULT_THETA = 10000.0
_SEQUENTIAL_TENSORS = ("markov_head.", "logit_head.", "candidate_selector.", "prefix_gru.")


def read_dflash(
    path: Path,
    top: Config,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: Literal["state", "head"] | None = None,
) -> DraftCheckpoint:
    """Read the draft at ``path``; no weights are loaded.

    Raises SpecbuildError if the draft is unsupported, has other tensors than required, or does not
    fit ``target``.
    """
    if norm_output is not None:
        raise SpecbuildError(
            f"--draft-norm-output {norm_output} needs an EAGLE3 draft, but this is a DFlash draft; "
            "remove the option"
        )
    config = read_dflash_config(top, strict=strict)
    tensors, note = _without_copies(top, open_directory(path), target)
    geometry = _geometry(config, tensors, target)
    _check_fit(path, geometry, config, target)
    shapes = dflash_shapes(geometry, target)
    expected = {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    audit(str(path), expected, tensors, _hints(tensors))
    return DraftCheckpoint(
        geometry,
        tensors,
        config.warnings + note + _rope_note(top, geometry, target),
        record=DFlashRecord,
    )


def dflash_shapes(g: DFlashGeometry, target: TargetGeometry) -> Shapes:
    """Return the shapes of a draft's tensors, by their names on disk."""
    q_rows, kv_rows = g.q_heads * g.head_dim, g.kv_heads * g.head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    attention: Shapes = {f"{part}_proj.weight": (n, g.hidden) for part, n in rows.items()}
    attention["o_proj.weight"] = (g.hidden, q_rows)
    if g.attention.qkv_bias:
        attention |= {f"{part}_proj.bias": (n,) for part, n in rows.items()}
        attention["o_proj.bias"] = (g.hidden,)
    if g.attention.qk_norm == "head":
        attention |= {f"{part}_norm.weight": (g.head_dim,) for part in "qk"}
    layer = prefixed("self_attn.", attention)
    layer |= prefixed("mlp.", swiglu_shapes(g.hidden, g.inner, bias=False))
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    layer |= dict.fromkeys(norms, (g.hidden,))
    shapes: Shapes = {
        "fc.weight": (g.hidden, len(g.aux_layers) * target.hidden),
        "hidden_norm.weight": (g.hidden,),
        "norm.weight": (g.hidden,),
    }
    for index in range(g.layers):
        shapes |= prefixed(f"layers.{index}.", layer)
    return shapes


def _without_copies(
    top: Config, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors of a DSpark draft without those that drafting does not use, and a note.

    DSpark's trainers also save the target's embedding and head, which they do not train, and a head
    that estimates acceptance.
    """
    if not is_dspark(top) or "d2t" in tensors:
        return tensors, ()
    shape = (target.vocab, target.hidden)
    unused = [
        name
        for name, tensor in tensors.items()
        if name.startswith("confidence_head.")
        or (name in ("embed_tokens.weight", "lm_head.weight") and tensor.shape == shape)
    ]
    if not unused:
        return tensors, ()
    return {name: tensor for name, tensor in tensors.items() if name not in unused}, (
        f"{top.label}: {', '.join(sorted(unused))} are not used: the draft has the target's "
        "embedding and head, and no estimate of acceptance",
    )


def _geometry(
    config: DFlashConfig, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> DFlashGeometry:
    decoder = config.decoder
    hidden, q_heads = decoder.integer("hidden_size"), decoder.integer("num_attention_heads")
    biases = decoder.boolean("attention_bias", False)
    has_norms = (
        "layers.0.self_attn.q_norm.weight" in tensors or decoder.get("model_type") == "qwen3"
    )
    rope = read_rope(decoder, default_theta=DEFAULT_THETA)
    return DFlashGeometry(
        architecture=ARCHITECTURES[0],
        hidden=hidden,
        vocab=target.vocab,
        q_heads=q_heads,
        kv_heads=decoder.integer("num_key_value_heads", q_heads),
        head_dim=decoder.optional_integer("head_dim") or hidden // q_heads,
        inner=decoder.integer("intermediate_size"),
        layers=decoder.count("num_hidden_layers"),
        rms_eps=decoder.number("rms_norm_eps", 1e-6),
        rope=rope,
        aux_layers=config.aux_layers,
        max_positions=read_optional_positions(decoder, rope),
        block_size=config.block_size,
        mask_token=config.mask_token,
        causal=config.causal,
        from_anchor=config.from_anchor,
        attention=AttentionParts(
            qkv_bias=biases, output_bias=biases, qk_norm="head" if has_norms else "none"
        ),
    )


def _check_fit(path: Path, g: DFlashGeometry, config: DFlashConfig, target: TargetGeometry) -> None:
    problems = []
    vocab = config.decoder.optional_integer("vocab_size")
    if vocab not in (None, target.vocab):
        problems.append(f"its vocab_size is {vocab}, the target's {target.vocab}")
    if g.hidden != target.hidden:
        problems.append(
            f"it shares the target's embedding and head, but its hidden size is {g.hidden}, the "
            f"target's {target.hidden}"
        )
    outside = [layer for layer in g.aux_layers if not 0 <= layer < target.layers]
    if outside:
        problems.append(
            f"it reads layers {outside}, but the target has layers 0 to {target.layers - 1}"
        )
    if g.mask_token >= target.vocab:
        problems.append(
            f"its mask token {g.mask_token} is not below the target's vocabulary of {target.vocab}"
        )
    if g.q_heads % g.kv_heads:
        problems.append(f"{g.q_heads} query heads are not a multiple of {g.kv_heads} KV heads")
    if g.head_dim % 2:
        problems.append(f"head_dim {g.head_dim} is odd, but rotary embedding needs pairs")
    if problems:
        raise SpecbuildError(f"{path}: does not fit the target: {'; '.join(problems)}")


def _hints(tensors: dict[str, SourceTensor]) -> list[str]:
    hints = []
    if {"lm_head.weight", "d2t"} & set(tensors):
        hints.append("DFlash drafts with a separate head or vocabulary are not supported")
    if any(name.startswith(_SEQUENTIAL_TENSORS) for name in tensors):
        hints.append("heads that read tokens of the block (DSpark, DFlash 2, Domino) are refused")
    return hints


def _rope_note(top: Config, g: DFlashGeometry, target: TargetGeometry) -> tuple[str, ...]:
    if (g.rope.theta, g.rope.scaling) == (target.rope.theta, target.rope.scaling):
        return ()
    return (
        f"{top.label}: RoPE is {describe(g.rope)}, the target's {describe(target.rope)}; the draft "
        "uses its own",
    )
