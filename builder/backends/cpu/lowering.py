"""The CPU lowering: the list of passes from portable graphs to ONNX Runtime graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import onnx_ir as ir

from specbuild.builder.backends.cpu.bodies import fuse_norms, lower_ops
from specbuild.builder.backends.cpu.projections import merge_projections
from specbuild.builder.backends.cpu.retype import quantize_pools, retype_to_fp32
from specbuild.builder.backends.cpu.rounded_weights import round_weights
from specbuild.builder.graph.passes.cleanup import merge_equal, remove_unused
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.graph.passes.pools import reorder_pools
from specbuild.builder.graph.passes.shapes import (
    cancelled_transposes,
    chained_reshapes,
    constant_reshapes,
)
from specbuild.plugins_cuda.linear.storage import storage_named

CPU_PASSES = (
    GraphPass("retype-fp32", retype_to_fp32),
    GraphPass("constant-reshapes", constant_reshapes),
    GraphPass("reorder-pools", reorder_pools),
    GraphPass("merge-projections", merge_projections),
    GraphPass("fuse-norms", fuse_norms),
    GraphPass("lower-ops", lower_ops),
    GraphPass("cancel-transposes", cancelled_transposes),
    GraphPass("remove-unused", remove_unused),
    GraphPass("chain-reshapes", chained_reshapes),
    GraphPass("merge-equal", merge_equal),
    GraphPass("remove-unused-again", remove_unused),
)


def cpu_passes(
    role: str,
    *,
    rounds_to: str | None = None,
    quantized_groups: Collection[str] = (),
    quantized: Callable[[ir.Model], int] | None = None,
) -> tuple[GraphPass, ...]:
    """Return the passes of a role's graph; the target's weights are rounded to ``rounds_to``.

    Keys and values of ``quantized_groups`` are stored quantized. ``quantized`` rewrites the
    products of quantized weights; without it these weights are dequantized.
    """
    optional = []
    if role == "target" and rounds_to is not None:
        storage = storage_named(rounds_to)
        optional.append(GraphPass("round-weights", partial(round_weights, storage=storage)))
    if quantized is not None:
        # Products that were merged earlier have no users. Without this pass they are merged again.
        optional.append(GraphPass("remove-merged", remove_unused))
        optional.append(GraphPass("quantize-products", quantized))
    if quantized_groups:
        optional.append(GraphPass("code-pools", partial(quantize_pools, groups=quantized_groups)))
    first = 1 + [a_pass.name for a_pass in CPU_PASSES].index("merge-projections")
    return (*CPU_PASSES[:first], *optional, *CPU_PASSES[first:])
