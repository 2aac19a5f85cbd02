"""Reads an EAGLE3 draft in any of its spellings, and holds it against its target."""

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
    """Read the draft at ``path``; of the weights only ``d2t`` and ``t2d`` are loaded.

    ``norm_output`` says what the config's flag of this name means, where that is known.

    Raises SpecbuildError if it is no EAGLE3 draft, needs what is not implemented, does not hold
    exactly the tensors that it should, or does not fit ``target``.
    """
    config = read_draft_config(top, target, strict, norm_output)
    return read_tensors(path, config, target, open_directory(path))


def read_tensors(
    path: Path, config: DraftConfig, target: TargetGeometry, stored: dict[str, SourceTensor]
) -> DraftCheckpoint:
    """The draft of the tensors ``stored``, by their names on disk; ``path`` names it in errors."""
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
    """That the config's number of layers is not the draft's."""
    named = decoder.count("num_hidden_layers", g.layers)
    if named == g.layers:
        return ()
    layers = "one layer" if g.layers == 1 else f"{g.layers} layers"
    return (
        f"{decoder.label}: num_hidden_layers {named} was taken for the target's; the draft is "
        f"read as {layers}",
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
    own_embedding = "embed_tokens.weight" in tensors
    head = _matrix(tensors, "lm_head.weight")
    own_head = head is not None or config.vocab not in (None, target.vocab)
    vocab = config.vocab or (head.shape[0] if head else target.vocab)
    mla = decoder.get("kv_lora_rank") is not None
    reading = "kv_a_proj_with_mqa" if mla else "q_proj"
    reads = _matrix(tensors, f"{LAYER}self_attn.{reading}.weight")
    narrow = reads is not None and reads.shape[1] == hidden
    per_state = "fc_norm.0.weight" in tensors
    offsets = own_head and (vocab != target.vocab or "d2t" in tensors)
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
        d2t_form="offsets" if offsets else "identity",
        sliding_window=config.sliding_window,
        own_embedding=own_embedding and not narrow,
        own_head=own_head,
        norm_before_fc=config.norm_before_fc and not per_state,
        input_width="hidden" if narrow else "embedding_and_hidden",
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        fc_norm=config.fc_norm or (config.norm_before_fc and per_state),
        attention=_attention_parts(decoder),
        mlp_bias=decoder.boolean("mlp_bias", False),
        layers=count_layers(tensors),
    )
    if mla:
        geometry = _with_latents(geometry, decoder)
    _check_fit(path, geometry, config, target)
    return geometry


def _with_latents(g: Eagle3Geometry, decoder: Config) -> Eagle3Geometry:
    """The geometry with MLA, whose heads are those of the absorbed form.

    Raises SpecbuildError for biases, norms of queries and keys, and windows.
    """
    if g.attention != AttentionParts() or g.mlp_bias or g.sliding_window:
        raise SpecbuildError(
            f"{decoder.where}: biases, norms of queries and keys, and windows are not implemented "
            "in a draft with MLA (kv_lora_rank)"
        )
    rope = dataclasses.replace(g.rope, interleaved=decoder.boolean("rope_interleave", True))
    mla = read_mla(decoder, rope)
    return dataclasses.replace(g, rope=rope, mla=mla, kv_heads=1, head_dim=mla.entry_width)


def _attention_parts(decoder: Config) -> AttentionParts:
    """``attention_bias`` is that of all four projections, ``qkv_bias`` of the first three."""
    every = decoder.boolean("attention_bias", False)
    return AttentionParts(
        qkv_bias=every or decoder.boolean("qkv_bias", False),
        output_bias=every,
        qk_norm="head" if decoder.get("model_type") == "qwen3" else "none",
    )


def _tie_head(path: Path, tensors: dict[str, SourceTensor], target: TargetGeometry) -> None:
    """Makes the draft's own embedding its head's source, where it has no head."""
    embedding = tensors.get("embed_tokens.weight")
    if "lm_head.weight" in tensors or (embedding is None and target.tied_head):
        return
    if embedding is None:
        raise SpecbuildError(
            f"{path}: tie_word_embeddings is true, but the draft has no embedding of its own; set "
            "it to false to take the target's head"
        )
    tensors["lm_head.weight"] = dataclasses.replace(embedding, name="lm_head.weight")


def _read_aux_layers(
    path: Path, config: DraftConfig, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> tuple[int, ...]:
    fc = _matrix(tensors, "fc.weight")
    if fc is None:
        if any(name.startswith(LAYER) for name in tensors):
            raise SpecbuildError(
                f"{path}: has no fc.weight; drafts that read the target's final state only are not "
                "implemented"
            )
        raise SpecbuildError(f"{path}: not an EAGLE3 draft, it has neither fc.weight nor {LAYER}*")
    count, rest = divmod(fc.shape[1], target.hidden)
    if rest or not count:
        raise SpecbuildError(
            f"{path}: does not fit the target: fc.weight is {fc.shape[1]} wide, no multiple of the "
            f"target's hidden size {target.hidden}"
        )
    aux_layers = config.aux_layers
    if aux_layers is None and count == 3:
        return default_aux_layers(target.layers)
    if aux_layers is None:
        raise SpecbuildError(
            f"{config.top.where}: fc.weight is {count} states wide, but "
            "eagle_config.eagle_aux_hidden_state_layer_ids does not say which; add it"
        )
    if len(aux_layers) != count:
        raise SpecbuildError(
            f"{config.top.where}: names {len(aux_layers)} aux layers, but fc.weight is {count} "
            f"states of {target.hidden} wide"
        )
    return aux_layers


def default_aux_layers(target_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs a draft without a list of its own reads (0-based)."""
    if target_layers > 5:
        return 1, target_layers // 2 - 1, target_layers - 4
    return 0, target_layers // 2, target_layers - 1


def _check_fit(path: Path, g: Eagle3Geometry, config: DraftConfig, target: TargetGeometry) -> None:
    wrong = []
    vocab = config.decoder.optional_integer("vocab_size")
    if vocab not in (None, target.vocab):
        wrong.append(f"its vocab_size is {vocab}, the target's {target.vocab}")
    if config.target_hidden not in (None, target.hidden):
        wrong.append(
            f"its target_hidden_size is {config.target_hidden}, the target's hidden size "
            f"{target.hidden}"
        )
    outside = [aux_layer for aux_layer in g.aux_layers if not 0 <= aux_layer < target.layers]
    if outside:
        wrong.append(f"it reads layers {outside}, the target has layers 0 to {target.layers - 1}")
    if g.vocab > target.vocab:
        wrong.append(f"its draft vocabulary is {g.vocab}, the target's only {target.vocab}")
    shares_embedding = not g.own_embedding and g.input_width == "embedding_and_hidden"
    if g.hidden != target.hidden and (shares_embedding or not g.own_head):
        shared = " and ".join(
            name
            for name, is_shared in (("embedding", shares_embedding), ("head", not g.own_head))
            if is_shared
        )
        wrong.append(
            f"it shares the target's {shared}, but its hidden size is {g.hidden}, the target's "
            f"{target.hidden}"
        )
    if g.q_heads % g.kv_heads:
        wrong.append(f"{g.q_heads} query heads do not divide among {g.kv_heads} KV heads")
    if g.rotated % 2:
        wrong.append(f"head_dim {g.head_dim} is odd, rotary embedding needs pairs")
    if wrong:
        raise SpecbuildError(f"{path}: does not fit the target: {'; '.join(wrong)}")


def _read_vocabulary_map(
    path: Path, g: Eagle3Geometry, tensors: dict[str, SourceTensor], target: TargetGeometry
) -> tuple[Eagle3Geometry, tuple[str, ...]]:
    """Check ``d2t`` and consume ``t2d``; a map becomes offsets."""
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
    warning = "draft: d2t holds target ids, not EAGLE3's offsets; it was converted"
    return dataclasses.replace(g, d2t_form="map"), (warning,)


def _rope_warning(top: Config, g: Eagle3Geometry, target: TargetGeometry) -> tuple[str, ...]:
    if (g.rope.theta, g.rope.scaling) == (target.rope.theta, target.rope.scaling):
        return ()
    return (
        f"{top.label}: RoPE is {describe(g.rope)}, the target's {describe(target.rope)}; the draft "
        "runs with its own",
    )


def _hints(config: DraftConfig, tensors: dict[str, SourceTensor]) -> list[str]:
    hints = []
    if any(name.startswith(("input_norm.", "fc_norm.")) for name in tensors) and not (
        config.norm_before_fc or config.fc_norm
    ):
        hints.append(
            "norms before fc are present, but the config has neither norm_before_fc nor fc_norm"
        )
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in tensors):
        hints.append("norms on q and k are those of a draft of model_type qwen3")
    if any(name.endswith("_proj.bias") for name in tensors):
        hints.append("biases are there with attention_bias, qkv_bias or mlp_bias only")
    if any(".mlp.experts." in name for name in tensors):
        hints.append("the draft's MLP has experts; only a dense MLP is implemented")
    return hints


def _matrix(tensors: dict[str, SourceTensor], name: str) -> SourceTensor | None:
    """The tensor if it is there with two axes; another rank is the audit's to report."""
    tensor = tensors.get(name)
    return tensor if tensor is not None and len(tensor.shape) == 2 else None
