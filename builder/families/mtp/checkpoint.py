"""Reads the MTP layer of a target's own checkpoint as a draft."""

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

# The layer's copies of what it shares with the model, and their names there.
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
    """The first MTP layer of the target's checkpoint at ``path``, whose configuration is ``top``.

    Raises SpecbuildError where there is none, or it does not hold exactly the tensors that it
    should.
    """
    if norm_output is not None:
        raise SpecbuildError(
            f"--draft-norm-output {norm_output} is of EAGLE3 drafts; an MTP layer always norms the "
            "state that it reads, leave it out"
        )
    naming = naming_of(target)
    counted = predictors(top) or (naming is not None and naming.prefix == BESIDE)
    if naming is None or not counted:
        raise SpecbuildError(
            f"{top.where}: names no MTP layer that drafts (num_nextn_predict_layers, in a model "
            "with MLA, a MiMo or a Qwen3.5); give a draft's directory with --draft"
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
            f"{path}: config.json names an MTP layer, but no tensor begins with {first}; the "
            "weights were saved without it, fetch those that its maker published"
        )
    geometry = mtp_geometry(target)
    moe = routed_part(geometry.feed_forward)
    if moe is not None:
        split_experts(tensors, naming.stored("mlp.experts."), moe)
    wanted = mtp_shapes(geometry, target)
    shapes = {naming.stored(name): shape for name, shape in wanted.items()}
    held = (target.vocab, target.hidden)
    shapes |= {name: held for name in COPIES if name in tensors}
    audit(
        f"{path}: MTP layer {first.split('.')[-2]}",
        {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()},
        tensors,
    )
    warnings = _warnings(stored, tensors, top)
    own = _as_deepseeks({name: tensors[naming.stored(name)] for name in wanted}, naming)
    return mtp_checkpoint(geometry, own, warnings)


def naming_of(target: TargetGeometry) -> Naming | None:
    """How such a model's MTP layer is named; None where none is known to have one."""
    named = NAMINGS.get(target.model_type)
    return DEEPSEEK if named is None and target.mla is not None else named


def mtp_checkpoint(
    d: MtpGeometry, tensors: Tensors, warnings: tuple[str, ...] = ()
) -> DraftCheckpoint:
    """What a reader gives of these tensors, which have the names of :func:`mtp_shapes`."""
    return DraftCheckpoint(d, block_for_engine(d, tensors), warnings, MtpRecord)


def mtp_shapes(d: MtpGeometry, target: TargetGeometry) -> Shapes:
    """The tensors of the layer, by names within it, without copies of the target's."""
    norms: Shapes = dict.fromkeys(_NORMS, (d.hidden,))
    return norms | {PROJECTION: (d.hidden, 2 * d.hidden)} | block_shapes(d, target)


def mtp_geometry(target: TargetGeometry) -> MtpGeometry:
    """The layer of a target of which :func:`naming_of` knows one."""
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


def _as_deepseeks(tensors: Tensors, naming: Naming) -> Tensors:
    """The tensors under DeepSeek's names, the projection's columns in DeepSeek's order."""
    made = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    if naming.hidden_first:
        made[PROJECTION] = remade(PROJECTION, made[PROJECTION], embedding_first)
    if naming.norms_less_1:
        norms = [name for name in made if name.endswith("norm.weight")]
        made |= {name: full_norm(made[name]) for name in norms}
    return made


def _warnings(stored: Tensors, tensors: Tensors, top: Config) -> tuple[str, ...]:
    said = []
    count = predictors(top)
    if count > 1:
        said.append(
            f"draft: of {count} MTP layers the first one drafts every level; the others are left "
            "out"
        )
    for copy, name in COPIES.items():
        one, other = tensors.get(copy), stored.get(name)
        if one is not None and other is not None and not torch.equal(one.load(), other.load()):
            said.append(
                f"draft: the MTP layer's {copy} differs from {name}, which is used; fewer drafts "
                "may be accepted"
            )
    return tuple(said)
