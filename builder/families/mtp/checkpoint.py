"""Reads the MTP layer of a target's own checkpoint as a draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.fp8_blocks import dequantised
from specbuild.builder.checkpoint.predictors import Tensors, predictors, split_predictors
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, open_directory
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.families.parts.mla_layer import MlaLayer
from specbuild.builder.families.parts.mla_tensors import layer_for_engine, layer_shapes
from specbuild.builder.families.parts.tensor_shapes import Shapes
from specbuild.runtime.engine_dir.geometry import MtpGeometry, TargetGeometry
from specbuild.runtime.engine_dir.manifest import MtpDrafter
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("DeepSeekMTPModel",)
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
    strict: bool,  # noqa: ARG001
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
    if target.mla is None or not predictors(top):
        raise SpecbuildError(
            f"{top.where}: names no MTP layer that drafts (num_nextn_predict_layers, in a model "
            "with MLA); give a draft's directory with --draft"
        )
    stored = open_directory(path)
    _, predicting = split_predictors(stored, target.layers, top)
    first = f"model.layers.{target.layers}."
    tensors: Tensors = {}
    for name, tensor in dequantised(predicting, top).items():
        if name.startswith(first):
            new = name.removeprefix(first)
            tensors[new] = replace(tensor, name=new)
    if not tensors:
        raise SpecbuildError(
            f"{path}: config.json names an MTP layer, but no tensor begins with {first}; the "
            "weights were saved without it, fetch those that its maker published"
        )
    geometry = _geometry(target)
    shapes = mtp_shapes(geometry)
    held = (target.vocab, target.hidden)
    shapes |= {name: held for name in COPIES if name in tensors}
    audit(
        f"{path}: MTP layer {target.layers}",
        {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()},
        tensors,
    )
    warnings = _warnings(stored, tensors, top)
    own = {name: tensor for name, tensor in tensors.items() if name not in COPIES}
    layer = layer_of(geometry)
    own |= layer_for_engine(own, "", layer, interleaved=geometry.rope.interleaved)
    return DraftCheckpoint(geometry, own, warnings, MtpDrafter)


def layer_of(d: MtpGeometry) -> MlaLayer:
    """Its block."""
    return MlaLayer(d.hidden, d.q_heads, d.mla, d.rms_eps, d.feed_forward)


def mtp_shapes(d: MtpGeometry) -> Shapes:
    """The tensors of the layer, by names within it, without copies of the target's."""
    norms: Shapes = dict.fromkeys(_NORMS, (d.hidden,))
    return norms | {"eh_proj.weight": (d.hidden, 2 * d.hidden)} | layer_shapes(layer_of(d))


def _geometry(target: TargetGeometry) -> MtpGeometry:
    assert target.mla is not None
    last = target.layers - 1
    return MtpGeometry(
        architecture=ARCHITECTURES[0],
        hidden=target.hidden,
        vocab=target.vocab,
        q_heads=target.q_heads,
        mla=target.mla,
        feed_forward=target.feed_forward(last),
        rms_eps=target.norm.eps,
        rope=target.rope,
        aux_layers=(last,),
        max_positions=target.max_positions,
    )


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
