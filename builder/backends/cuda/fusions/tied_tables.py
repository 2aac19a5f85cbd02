"""Stores a table that is both embedding and head once, in the head's packed form."""

from __future__ import annotations

import onnx_ir as ir
import torch

from specbuild.builder.backends.cuda.fusions.fused_node import packed, stem
from specbuild.builder.graph.weight_sources import DRAFT_PREFIX
from specbuild.plugins_cuda.linear.packing import pack_rows, whole_tiles
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.drafters.record import own_name
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS

_READERS = ("Embed", "DraftInput")
# The prefixes of names of a draft's weights.
_OF_DRAFT = tuple(own_name(group, DRAFT_PREFIX) for group in DRAFT_GROUPS)


def _packed(table: torch.Tensor) -> torch.Tensor:
    return pack_rows(whole_tiles(table))


def share_tied_tables(model: ir.Model, *, tied: bool) -> int:
    """Pack the tables of Embed and DraftInput that a head of this graph has packed.

    ``tied`` states that the target's table is its head, possibly in another graph. Returns the
    number of tables.
    """
    graph, changed = model.graph, 0
    for node in graph:
        if node.op_type not in _READERS:
            continue
        index = [tensor.name for tensor in op_named(node.op_type).inputs].index("table")
        table = node.inputs[index] if index < len(node.inputs) else None
        if table is None or table.producer() is not None or table.is_graph_input():
            continue
        name = f"{stem(table)}.packed"
        is_target = not name.startswith(_OF_DRAFT)
        if name in graph.initializers or (tied and is_target):
            node.replace_input_with(index, packed(graph, name, [table], _packed))
            changed += 1
    return changed
