"""Reads an EAGLE3 draft in any format, and checks that it fits its target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.rope import describe, read_optional_positions, read_rope
from specbuild.builder.checkpoint.source import SourceTensor, open_directory
from specbuild.builder.families.eagle3.config import DraftConfig, NormOutput, read_draft_config
from specbuild.builder.families.eagle3.tensors import (
    LAYER,
    LAYER_ALIAS,
    count_layers,
    draft_tensors,
    tensors_for_engine,
)
from specbuild.builder.families.eagle3.vocabulary_map import read_offsets
from specbuild.builder.families.parts.mla_config import read_mla
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry, Eagle3Record
from specbuild.runtime.engine_dir.geometry import AttentionParts, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

DEFAULT_THETA = 10000.0


def read_eagle3(
    path: Path,
    top: Config,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: NormOutput | None = None,
) -> DraftCheckpoint:
    """Read the draft at ``path``; of its weights only ``d2t`` and ``t2d`` are loaded.

    ``norm_output`` is the meaning of the config's flag of this name; None means unspecified. Raises
    SpecbuildError if the draft is unsupported, has other tensors than required, or does not fit
    ``target``.
    """
    config = read_draft_config(top, target, strict, norm_output)
    return read_tensors(path, config, target, open_directory(path))


def read_tensors(
    path: Path, config: DraftConfig, target: TargetGeometry, stored: dict[str, SourceTensor]
) -> DraftCheckpoint:
    """Return the draft of the tensors ``stored``, by names on disk; ``path`` is for errors."""
    tensors = _canonical_names(path, stored)
    if config.tied_head:
        _tie_head(path, tensors, target)
    geometry = _read_geometry(path, config, tensors, target)
    expected = draft_tensors(geometry, target)
    if "t2d" in tensors and "d2t" in expected:
        expected["t2d"] = ExpectedTensor((target.vocab,), ("BOOL",))
    audit(str(path), expected, tensors, _hints(config, tensors))
    geometry, warnings = _read_vocabulary_map(path, geometry, tensors, target)
    warnings = config.warnings + _layers_note(config.decoder, geometry) + warnings
    warnings += _rope_warning(config.top, geometry, target)
    return DraftCheckpoint(geometry, tensors_for_engine(tensors, geometry), warnings, Eagle3Record)


def _layers_note(decoder: Config, g: Eagle3Geometry) -> tuple[str, ...]:
    """Return a note if the config's number of layers differs from the draft's."""
    configured = decoder.count("num_hidden_layers", g.layers)
    if configured == g.layers:
        return ()
    layers = "one layer" if g.layers == 1 else f"{g.layers} layers"
    return (
        f"{decoder.label}: num_hidden_layers {configured} is ignored, because it seems to be the "
        f"target's; the draft has {layers}",
    )


def _canonical_names(path: Path, tensors: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    canonical: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        new = LAYER + name.removeprefix(LAYER_ALIAS) if name.startswith(LAYER_ALIAS) else name
        if new in canonical:
            raise SpecbuildError(
                f"{path}: {' and '.join((*canonical[new].sources, name))} are the same tensor of "
                "the draft; keep one of them"
            )
        canonical[new] = dataclasses.replace(tensor, name=new)
    return canonical


def _read_geometry(
    path: Path, config: DraftConfig, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> Eagle3Geometry:
    decoder = config.decoder
    hidden = decoder.integer("hidden_size")
    q_heads = decoder.integer("num_attention_heads")
    has_embedding = "embed_tokens.weight" in tensors
    head = _matrix(tensors, "lm_head.weight")
    has_head = head is not None or config.vocab not in (None, target.vocab)
    vocab = config.vocab or (head.shape[0] if head else target.vocab)
    mla = decoder.get("kv_lora_rank") is not None
    reading = "kv_a_proj_with_mqa" if mla else "q_proj"
    projection = _matrix(tensors, f"{LAYER}self_attn.{reading}.weight")
    reads_hidden_only = projection is not None and projection.shape[1] == hidden
    has_norm_per_state = "fc_norm.0.weight" in tensors
    has_offsets = has_head and (vocab != target.vocab or "d2t" in tensors)
    head_dim = decoder.optional_integer("head_dim") or hidden // q_heads
    rope = read_rope(decoder, default_theta=DEFAULT_THETA)
    geometry = Eagle3Geometry(
        architecture=config.architecture,
        hidden=hidden,
        vocab=vocab,
        q_heads=q_heads,
        kv_heads=decoder.integer("num_key_value_heads", q_heads),
        head_dim=head_dim,
        inner=decoder.integer("intermediate_size"),
        rms_eps=decoder.number("rms_norm_eps", 1e-6),
        rope=rope,
        aux_layers=_read_aux_layers(path, config, tensors, target),
        max_positions=read_optional_positions(decoder, rope),
        d2t_form="offsets" if has_offsets else "identity",
        sliding_window=config.sliding_window,
        own_embedding=has_embedding and not reads_hidden_only,
        own_head=has_head,
        norm_before_fc=config.norm_before_fc and not has_norm_per_state,
        input_width="hidden" if reads_hidden_only else "embedding_and_hidden",
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        fc_norm=config.fc_norm or (config.norm_before_fc and has_norm_per_state),
        attention=_attention_parts(decoder),
        mlp_bias=decoder.boolean("mlp_bias", False),
        layers=count_layers(tensors),
    )
    if mla:
        geometry = _with_latents(geometry, decoder)
    _check_fit(path, geometry, config, target)
    return geometry


def _with_latents(g: Eagle3Geometry, decoder: Config) -> Eagle3Geometry:
    """Return the geometry with MLA, whose heads are those of the absorbed form.

    Raises SpecbuildError for biases, norms of queries and keys, and windows.
    """
    if g.attention != AttentionParts() or g.mlp_bias or g.sliding_window:
        raise SpecbuildError(
            f"{decoder.where}: drafts with MLA (kv_lora_rank) do not support biases, norms of "
            "queries and keys, or windows"
        )
    rope = dataclasses.replace(g.rope, interleaved=decoder.boolean("rope_interleave", True))
    mla = read_mla(decoder, rope)
    return dataclasses.replace(g, rope=rope, mla=mla, kv_heads=1, head_dim=mla.entry_width)


def _attention_parts(decoder: Config) -> AttentionParts:
    """``attention_bias`` applies to all four projections, ``qkv_bias`` to the first three."""
    all_biased = decoder.boolean("attention_bias", False)
    return AttentionParts(
        qkv_bias=all_biased or decoder.boolean("qkv_bias", False),
        output_bias=all_biased,
        qk_norm="head" if decoder.get("model_type") == "qwen3" else "none",
    )


def _tie_head(path: Path, tensors: dict[str, SourceTensor], target: TargetGeometry) -> None:
    """Use the draft's embedding for its head, if its head is tied and absent."""
    embedding = tensors.get("embed_tokens.weight")
    if "lm_head.weight" in tensors or (embedding is None and target.tied_head):
        return
    if embedding is None:
        raise SpecbuildError(
            f"{path}: tie_word_embeddings is true, but the draft has no embedding; set it to false "
            "to use the target's head"
        )
    tensors["lm_head.weight"] = dataclasses.replace(embedding, name="lm_head.weight")


def _read_aux_layers(
    path: Path, config: DraftConfig, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> tuple[int, ...]:
    fc = _matrix(tensors, "fc.weight")
    if fc is None:
        if any(name.startswith(LAYER) for name in tensors):
            raise SpecbuildError(
                f"{path}: has no fc.weight; drafts that read only the target's final state are not "
                "supported"
            )
        raise SpecbuildError(f"{path}: not an EAGLE3 draft, it has neither fc.weight nor {LAYER}*")
    count, remainder = divmod(fc.shape[1], target.hidden)
    if remainder or not count:
        raise SpecbuildError(
            f"{path}: does not fit the target: fc.weight is {fc.shape[1]} wide, expected a "
            f"multiple of the target's hidden size {target.hidden}"
        )
    aux_layers = config.aux_layers
    if aux_layers is None and count == 3:
        return default_aux_layers(target.layers)
    if aux_layers is None:
        raise SpecbuildError(
            f"{config.top.where}: fc.weight reads {count} hidden states, but "
            "eagle_config.eagle_aux_hidden_state_layer_ids does not list their layers; add it"
        )
    if len(aux_layers) != count:
        raise SpecbuildError(
            f"{config.top.where}: got {len(aux_layers)} aux layers, but fc.weight reads {count} "
            f"states of {target.hidden}"
        )
    return aux_layers


def default_aux_layers(target_layers: int) -> tuple[int, int, int]:
    """Return the default layers (0-based) whose outputs a draft reads."""
    if target_layers > 5:
        return 1, target_layers // 2 - 1, target_layers - 4
    return 0, target_layers // 2, target_layers - 1


def _check_fit(path: Path, g: Eagle3Geometry, config: DraftConfig, target: TargetGeometry) -> None:
    problems = []
    vocab = config.decoder.optional_integer("vocab_size")
    if vocab not in (None, target.vocab):
        problems.append(f"its vocab_size is {vocab}, the target's {target.vocab}")
    if config.target_hidden not in (None, target.hidden):
        problems.append(
            f"its target_hidden_size is {config.target_hidden}, the target's hidden size "
            f"{target.hidden}"
        )
    outside = [aux_layer for aux_layer in g.aux_layers if not 0 <= aux_layer < target.layers]
    if outside:
        problems.append(
            f"it reads layers {outside}, but the target has layers 0 to {target.layers - 1}"
        )
    if g.vocab > target.vocab:
        problems.append(f"its draft vocabulary is {g.vocab}, but the target's is {target.vocab}")
    shares_embedding = not g.own_embedding and g.input_width == "embedding_and_hidden"
    if g.hidden != target.hidden and (shares_embedding or not g.own_head):
        shared = " and ".join(
            name
            for name, is_shared in (("embedding", shares_embedding), ("head", not g.own_head))
            if is_shared
        )
        problems.append(
            f"it shares the target's {shared}, but its hidden size is {g.hidden}, the target's "
            f"{target.hidden}"
        )
    if g.q_heads % g.kv_heads:
        problems.append(f"{g.q_heads} query heads are not a multiple of {g.kv_heads} KV heads")
    if g.rotated % 2:
        problems.append(f"head_dim {g.head_dim} is odd, but rotary embedding needs pairs")
    if problems:
        raise SpecbuildError(f"{path}: does not fit the target: {'; '.join(problems)}")


def _read_vocabulary_map(
    path: Path, g: Eagle3Geometry, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> tuple[Eagle3Geometry, tuple[str, ...]]:
    """Check ``d2t`` and remove ``t2d``; a map is converted to offsets."""
    t2d = tensors.pop("t2d", None)
    if g.d2t_form == "identity":
        return g, ()
    source = tensors["d2t"]
    members = t2d.load() if t2d else None
    form, offsets = read_offsets(str(path), source.load(), members, target.vocab)
    if form == "offsets":
        return g, ()

    def load() -> torch.Tensor:
        return offsets

    tensors["d2t"] = dataclasses.replace(source, dtype="I64", load=load, file=None, offset=None)
    warning = "draft: d2t has target ids instead of EAGLE3's offsets; it was converted"
    return dataclasses.replace(g, d2t_form="map"), (warning,)


def _rope_warning(top: Config, g: Eagle3Geometry, target: TargetGeometry) -> tuple[str, ...]:
    if (g.rope.theta, g.rope.scaling) == (target.rope.theta, target.rope.scaling):
        return ()
    return (
        f"{top.label}: RoPE is {describe(g.rope)}, the target's {describe(target.rope)}; the draft "
        "uses its own",
    )


def _hints(config: DraftConfig, tensors: dict[str, SourceTensor]) -> list[str]:
    hints = []
    if any(name.startswith(("input_norm.", "fc_norm.")) for name in tensors) and not (
        config.norm_before_fc or config.fc_norm
    ):
        hints.append(
            "there are norms before fc, but the config has neither norm_before_fc nor fc_norm"
        )
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in tensors):
        hints.append("only drafts of model_type qwen3 have norms on q and k")
    if any(name.endswith("_proj.bias") for name in tensors):
        hints.append("biases need attention_bias, qkv_bias or mlp_bias")
    if any(".mlp.experts." in name for name in tensors):
        hints.append("the draft's MLP has experts; only a dense MLP is supported")
    return hints


def _matrix(tensors: dict[str, SourceTensor], name: str) -> SourceTensor | None:
    """Return the tensor if it has two axes; the audit reports another rank."""
    tensor = tensors.get(name)
    return tensor if tensor is not None and len(tensor.shape) == 2 else None
