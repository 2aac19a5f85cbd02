"""The graphs of single ops, in portable form, by role."""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.families.parts.graph_io import InputPort
from specbuild.builder.graph.export import single_op_model
from specbuild.builder.graph.passes.weights import rename_weight, weight_value
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP, DraftGeometry, own_name


def expand_graph(d: DraftGeometry, sources: WeightSources, group: str = DRAFT_GROUP) -> ir.Model:
    """The role ``expand``; the draft vocabulary's offsets are a weight of it."""
    ports = (
        InputPort("logits", torch.float32, ("BF", d.vocab)),
        InputPort("score", torch.float32, ("B", "F")),
        InputPort("top_k", torch.int32, ()),
    )
    offsets = weight_value("d2t", sources.d2t(group))
    model = single_op_model("expand", "TreeExpand", ports, {}, [offsets])
    rename_weight(model.graph, offsets, own_name(group, "d2t"))
    return model


def choose_graph(vocab: int) -> ir.Model:
    """The role ``choose``."""
    ports = (
        _floats("logits", "R", vocab),
        _floats("temperature", "R"),
        _ints("top_k", "R"),
        _floats("top_p", "R"),
        _ints("seed", "R"),
        _ints("position", "R"),
    )
    return single_op_model("choose", "Choose", ports, {})


def select_graph(depth: int) -> ir.Model:
    """The role ``select`` of a draft that grows trees."""
    ports = (
        _ints("tokens", "B", "M"),
        _floats("scores", "B", "M"),
        _ints("parents", "B", "M"),
        _ints("draft_tokens"),
    )
    return single_op_model("select", "TreeSelect", ports, {"depth": depth})


def accept_graph(depth: int) -> ir.Model:
    """The role ``accept``, whoever made the trees."""
    ports = (
        _ints("tokens", "B", "N1"),
        _ints("parents", "B", "N1"),
        _ints("ancestor_bits", "B", "N1", "W"),
        _ints("count", "B"),
        _ints("choice", "B", "N1"),
    )
    return single_op_model("accept", "TreeAccept", ports, {"depth": depth})


def _ints(name: str, *shape: str) -> InputPort:
    return InputPort(name, torch.int32, shape)


def _floats(name: str, *shape: int | str) -> InputPort:
    return InputPort(name, torch.float32, shape)
