"""Reads an assistant of Gemma 4, and checks that it fits its target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, Tensors, open_directory, remade
from specbuild.builder.checkpoint.target_parts import EMBEDDING, tie_head
from specbuild.builder.families.gemma4.checkpoint import read_config
from specbuild.builder.families.gemma4.tensors import canonical, gemma4_tensors
from specbuild.builder.families.parts.tensor_shapes import Shapes
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import (
    AssistantGeometry,
    AssistantRecord,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
PROJECTIONS = ("pre_projection.weight", "post_projection.weight")
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
# The defaults of transformers.
_CLUSTERS, _READ_CLUSTERS = 2048, 32
_BACKBONE = "model."
_SHARED_CACHES = "num_kv_shared_layers"
_INPUTS = "hidden_size_per_layer_input"
_FIELDS = FieldTable(
    read=frozenset(
        {
            "architectures",
            "backbone_hidden_size",
            "centroid_intermediate_top_k",
            "model_type",
            "num_centroids",
            "text_config",
            "use_ordered_embeddings",
        }
    ),
    only={"quantization_config": (), "tie_word_embeddings": (True,)},
)


def is_assistant(config: Config) -> bool:
    """Return whether a config has the model type of an assistant."""
    return config.get("model_type") in MODEL_TYPES


def read_assistant(
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
            f"--draft-norm-output {norm_output} needs an EAGLE3 draft, but this is an assistant; "
            "remove the option"
        )
    warnings = check_fields(top, _FIELDS, strict=strict)
    decoder, notes = _read_decoder(path, top.section("text_config"), strict=strict)
    ordered = top.boolean("use_ordered_embeddings", False)
    geometry = AssistantGeometry(
        architecture=next(
            (name for name in top.texts("architectures") if name in ARCHITECTURES), ARCHITECTURES[0]
        ),
        hidden=top.integer("backbone_hidden_size", 1536),
        decoder=decoder,
        aux_layers=(target.layers - 1,),
        clusters=top.integer("num_centroids", _CLUSTERS) if ordered else 0,
        read_clusters=top.integer("centroid_intermediate_top_k", _READ_CLUSTERS) if ordered else 0,
    )
    _check_fit(path, geometry, target)
    stored = open_directory(path)
    tie_head(path, stored)
    tensors, _ = canonical(stored, decoder, top)
    expected = gemma4_tensors(decoder)
    shapes = own_shapes(geometry)
    expected |= {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    if geometry.clusters:
        expected[ORDERING] = ExpectedTensor((geometry.vocab,), ("I64",))
    audit(str(path), expected, tensors)
    if geometry.clusters:
        _check_order(path, tensors)
    return assistant_checkpoint(geometry, tensors, warnings + notes)


def assistant_checkpoint(
    d: AssistantGeometry, tensors: Tensors, warnings: tuple[str, ...] = ()
) -> DraftCheckpoint:
    """Return the result of reading these tensors, by their names in a checkpoint."""
    before = PROJECTIONS[0]
    own = {name: tensor for name, tensor in tensors.items() if name not in (EMBEDDING, before)}
    renamed = {
        (new := name.removeprefix(_BACKBONE)): replace(tensor, name=new)
        for name, tensor in own.items()
    }
    for half, name in enumerate(("embedding_projection.weight", "state_projection.weight")):
        renamed[name] = remade(name, tensors[before], partial(_half, place=half))
    if d.clusters:
        renamed[ORDERING] = remade(ORDERING, renamed[ORDERING], torch.Tensor.int, dtype="I32")
    return DraftCheckpoint(d, renamed, warnings, AssistantRecord)


def _half(projection: torch.Tensor, place: int) -> torch.Tensor:
    """Return the columns of pre_projection [Hd, 2H] for the embedding (0) or the state (1)."""
    return projection.chunk(2, dim=1)[place].contiguous()


def own_shapes(d: AssistantGeometry) -> Shapes:
    """Return the shapes of the projections from and to the target's width, and of centroids."""
    before, after = PROJECTIONS
    shapes: Shapes = {
        before: (d.decoder.hidden, 2 * d.hidden),
        after: (d.hidden, d.decoder.hidden),
    }
    return shapes | ({CENTROIDS: (d.clusters, d.decoder.hidden)} if d.clusters else {})


def _check_order(path: Path, tensors: Tensors) -> None:
    """Raise SpecbuildError unless the tokens by cluster are all tokens, once each."""
    order = tensors[ORDERING].load().sort().values
    if not torch.equal(order, torch.arange(len(order))):
        raise SpecbuildError(
            f"{path}: {ORDERING} does not list each of the {len(order)} tokens once; use the "
            "published file"
        )


def _read_decoder(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry of layers that all share other layers' caches."""
    if config.get("model_type") is None:
        raise config.wrong("model_type", "gemma4_text or gemma4_unified_text")
    # A target must have layers of its own; all of the assistant's are the target's.
    fields = {name: value for name, value in config.fields.items() if name != _SHARED_CACHES}
    g, notes = read_config(path, replace(config, fields={_INPUTS: 0} | fields), strict=strict)
    if g.layer_inputs is not None:
        raise config.wrong(_INPUTS, "0 in an assistant")
    if g.moe is not None:
        raise config.wrong("enable_moe_block", "false in an assistant")
    decoder = replace(g, shared_caches=g.layers, tied_head=True, multipliers=None, eos_token_ids=())
    return decoder, notes


def _check_fit(path: Path, d: AssistantGeometry, target: TargetGeometry) -> None:
    problems = []
    if d.hidden != target.hidden:
        problems.append(
            f"its backbone_hidden_size is {d.hidden}, the target's hidden size {target.hidden}"
        )
    if d.vocab != target.vocab:
        problems.append(f"its vocab_size is {d.vocab}, the target's {target.vocab}")
    read = {target.layer_types[layer]: layer for layer in d.target_layers(target)}
    for kind in sorted(set(d.decoder.layer_types)):
        if kind not in read:
            problems.append(f"it has layers of type {kind}, the target has none with keys")
            continue
        layer, own = read[kind], d.decoder.layer_types.index(kind)
        heads, read_heads = d.decoder.heads_of(own), target.heads_of(layer)
        if heads != read_heads:
            problems.append(
                f"its {kind} reads {heads.kv_heads} KV heads of {heads.head_dim}, the target's has "
                f"{read_heads.kv_heads} of {read_heads.head_dim}"
            )
        if d.decoder.rope_of(own) != target.rope_of(layer):
            problems.append(f"its {kind} has another RoPE than the target's")
    if d.decoder.sliding_window > target.sliding_window:
        problems.append(
            f"its sliding_window is {d.decoder.sliding_window}, but the target only keeps "
            f"{target.sliding_window} tokens"
        )
    if d.clusters and (d.vocab % d.clusters or not 0 < d.read_clusters <= d.clusters):
        problems.append(
            f"{d.clusters} clusters, of which it reads {d.read_clusters}, do not divide its "
            f"vocabulary of {d.vocab}"
        )
    if problems:
        raise SpecbuildError(f"{path}: does not fit the target: {'; '.join(problems)}")
