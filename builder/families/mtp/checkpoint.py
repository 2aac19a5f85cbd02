"""Reads the MTP layer of a target's checkpoint as a draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.opened import open_target
from specbuild.builder.checkpoint.predictors import BESIDE, predictors, split_predictors
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, Tensors, remade
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.mtp.block import block_for_engine, block_shapes
from specbuild.builder.families.mtp.naming import (
    DEEPSEEK,
    NAMINGS,
    PROJECTION,
    Naming,
    embedding_first,
)
from specbuild.builder.families.parts.experts import split_experts
from specbuild.builder.families.parts.grouped_tensors import full_norm
from specbuild.builder.families.parts.tensor_shapes import Shapes
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry, MtpRecord
from specbuild.runtime.engine_dir.feed_forward import routed_part
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

# The layer's copies of shared weights, and the names of these weights in the model.
COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
_NORMS = (
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def read_mtp(
    path: Path,
    top: Config,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: str | None = None,
) -> DraftCheckpoint:
    """Read the first MTP layer of the target's checkpoint at ``path`` with the config ``top``.

    Raises SpecbuildError if there is none, or it has other tensors than required.
    """
    if norm_output is not None:
        raise SpecbuildError(
            f"--draft-norm-output {norm_output} needs an EAGLE3 draft; an MTP layer always reads "
            "the normed state, remove the option"
        )
    naming = naming_of(target)
    has_layer = predictors(top) or (naming is not None and naming.prefix == BESIDE)
    if naming is None or not has_layer:
        raise SpecbuildError(
            f"{top.where}: has no supported MTP layer (num_nextn_predict_layers, in a model with "
            "MLA, a MiMo or a Qwen3.5); pass a draft's directory with --draft"
        )
    stored = open_target(path, {}).tensors()
    stored = float_tensors(stored, top, strict=strict).tensors
    _, predicting = split_predictors(stored, target.layers, top)
    first = naming.first(target.layers)
    tensors: Tensors = {}
    for name, tensor in predicting.items():
        if name.startswith(first):
            new = name.removeprefix(first)
            tensors[new] = replace(tensor, name=new)
    if not tensors:
        raise SpecbuildError(
            f"{path}: config.json has an MTP layer, but no tensor starts with {first}; the weights "
            "were saved without it, use the published checkpoint"
        )
    geometry = mtp_geometry(target)
    moe = routed_part(geometry.feed_forward)
    if moe is not None:
        split_experts(tensors, naming.stored("mlp.experts."), moe)
    expected = mtp_shapes(geometry, target)
    shapes = {naming.stored(name): shape for name, shape in expected.items()}
    shared_shape = (target.vocab, target.hidden)
    shapes |= {name: shared_shape for name in COPIES if name in tensors}
    audit(
        f"{path}: MTP layer {first.split('.')[-2]}",
        {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()},
        tensors,
    )
    warnings = _warnings(stored, tensors, top)
    own_tensors = _with_deepseek_names(
        {name: tensors[naming.stored(name)] for name in expected}, naming
    )
    return mtp_checkpoint(geometry, own_tensors, warnings)


def naming_of(target: TargetGeometry) -> Naming | None:
    """Return the naming of such a model's MTP layer, or None without one."""
    naming = NAMINGS.get(target.model_type)
    return DEEPSEEK if naming is None and target.mla is not None else naming


def mtp_checkpoint(
    d: MtpGeometry, tensors: Tensors, warnings: tuple[str, ...] = ()
) -> DraftCheckpoint:
    """Return the result of reading these tensors, with the names of :func:`mtp_shapes`."""
    return DraftCheckpoint(d, block_for_engine(d, tensors), warnings, MtpRecord)


def mtp_shapes(d: MtpGeometry, target: TargetGeometry) -> Shapes:
    """Return the layer's tensors by names within it, without copies of the target's."""
    norms: Shapes = dict.fromkeys(_NORMS, (d.hidden,))
    return norms | {PROJECTION: (d.hidden, 2 * d.hidden)} | block_shapes(d, target)


def mtp_geometry(target: TargetGeometry) -> MtpGeometry:
    """Return the MTP layer of a target that has a :func:`naming_of`."""
    last, grouped = target.layers - 1, target.mla is None
    naming = naming_of(target)
    assert naming is not None
    return MtpGeometry(
        architecture=naming.architecture,
        hidden=target.hidden,
        vocab=target.vocab,
        q_heads=target.q_heads,
        mla=target.mla,
        feed_forward=target.feed_forward(last),
        rms_eps=target.norm.eps,
        rope=target.rope,
        aux_layers=(last,),
        max_positions=target.max_positions,
        kv_heads=target.kv_heads,
        key_width=target.head_dim if grouped else 0,
    )


def _with_deepseek_names(tensors: Tensors, naming: Naming) -> Tensors:
    """Rename the tensors as in DeepSeek, with the projection's columns in DeepSeek's order."""
    renamed = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    if naming.hidden_first:
        renamed[PROJECTION] = remade(PROJECTION, renamed[PROJECTION], embedding_first)
    if naming.norms_less_1:
        norms = [name for name in renamed if name.endswith("norm.weight")]
        renamed |= {name: full_norm(renamed[name]) for name in norms}
    return renamed


def _warnings(stored: Tensors, tensors: Tensors, top: Config) -> tuple[str, ...]:
    warnings = []
    count = predictors(top)
    if count > 1:
        warnings.append(
            f"draft: the first of {count} MTP layers drafts all levels; the others are not used"
        )
    for copy, name in COPIES.items():
        one, other = tensors.get(copy), stored.get(name)
        if one is not None and other is not None and not torch.equal(one.load(), other.load()):
            warnings.append(
                f"draft: the MTP layer's {copy} differs from {name}, which is used; this can lower "
                "the acceptance rate"
            )
    return tuple(warnings)
