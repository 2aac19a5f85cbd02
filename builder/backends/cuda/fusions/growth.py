"""Appends factors of queries by position to the table of cosines that RmsQkvRope reads."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.matching import constant_factor, layout_origin
from specbuild.builder.graph.passes.rewriting import producer
from specbuild.builder.graph.passes.weights import derive


@dataclass(frozen=True)
class Growth:
    """``product`` is ``queries`` times ``1 + beta · ln(1 + ⌊position / original⌋)``."""

    product: ir.Value
    queries: ir.Value
    beta: float
    original: float

    def append_to(self, graph: ir.Graph, cos: ir.Value | None) -> ir.Value:
        """Return the table ``cos`` [P, W] followed by the factors of its positions, W per row.

        The factors are rounded to bf16, as in the model.
        """

        def make(table: torch.Tensor) -> torch.Tensor:
            count, width = table.shape
            steps = torch.arange(count, device=table.device, dtype=torch.float32) / self.original
            factors = (1 + self.beta * (1 + steps.floor()).log()).bfloat16().float()
            rows = F.pad(factors, (0, -count % width)).view(-1, width)
            return torch.cat([table, rows])

        assert cos is not None
        return derive(graph, f"{cos.name}.growth", [cos], make)


def query_growth(value: ir.Value | None) -> Growth | None:
    """Return the factor of queries by position, or None if there is none."""
    product = producer(value, "Mul")
    if product is None:
        return None
    queries, factor = product.inputs
    times_beta = _before_add_one(factor)
    beta = constant_factor(times_beta)
    log = None if times_beta is None else producer(times_beta.inputs[0], "Log")
    floor = None if log is None else _before_add_one(log.inputs[0])
    div = None if floor is None else producer(floor.inputs[0], "Div")
    original = constant_factor(div, "Div")
    if queries is None or beta is None or original is None:
        return None
    return Growth(product.outputs[0], queries, beta, original)


def _before_add_one(value: ir.Value | None) -> ir.Node | None:
    """Return the node whose result plus 1 is this value, through layout and full slices."""
    value = layout_origin(value)
    full_slice = producer(value, "Slice")
    add = producer(layout_origin(value if full_slice is None else full_slice.inputs[0]), "Add")
    one = None if add is None else constant_factor(add, "Add")
    return None if add is None or one != 1 or add.inputs[0] is None else add.inputs[0].producer()
