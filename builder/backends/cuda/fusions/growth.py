"""Factors of queries by their position, as rows behind the cosines that RmsQkvRope reads."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch.nn import functional as F

from specbuild.builder.backends.cuda.fusions.matching import constant_factor, laid_out
from specbuild.builder.graph.passes.rewriting import producer
from specbuild.builder.graph.passes.weights import derive


@dataclass(frozen=True)
class Growth:
    """``product`` is ``queries`` times ``1 + beta · ln(1 + ⌊position / original⌋)``."""

    product: ir.Value
    queries: ir.Value
    beta: float
    original: float

    def behind(self, graph: ir.Graph, cos: ir.Value | None) -> ir.Value:
        """The table ``cos`` [P, W], and behind it the factors of its positions, W a row.

        They are rounded to bf16, as queries are multiplied by them.
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
    """What multiplies queries by their position; None where nothing does."""
    product = producer(value, "Mul")
    if product is None:
        return None
    queries, factor = product.inputs
    times_beta = _behind_one(factor)
    beta = constant_factor(times_beta)
    log = None if times_beta is None else producer(times_beta.inputs[0], "Log")
    floor = None if log is None else _behind_one(log.inputs[0])
    div = None if floor is None else producer(floor.inputs[0], "Div")
    original = constant_factor(div, "Div")
    if queries is None or beta is None or original is None:
        return None
    return Growth(product.outputs[0], queries, beta, original)


def _behind_one(value: ir.Value | None) -> ir.Node | None:
    """The node whose result plus 1 a value is, layout and whole slices aside."""
    value = laid_out(value)
    whole = producer(value, "Slice")
    add = producer(laid_out(value if whole is None else whole.inputs[0]), "Add")
    one = None if add is None else constant_factor(add, "Add")
    return None if add is None or one != 1 or add.inputs[0] is None else add.inputs[0].producer()
