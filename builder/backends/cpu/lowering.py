"""The CPU lowering: portable graphs to ONNX Runtime graphs, as a readable list of passes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from specbuild.builder.backends.cpu.bodies import lower_ops
from specbuild.builder.backends.cpu.coded_pools import code_pools
from specbuild.builder.backends.cpu.norms import fuse_norms
from specbuild.builder.backends.cpu.projections import merge_projections
from specbuild.builder.backends.cpu.retype import retype_to_fp32
from specbuild.builder.backends.cpu.rounded_weights import round_weights
from specbuild.builder.graph.passes.cleanup import merge_equal, remove_unused
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.graph.passes.pools import reorder_pools
from specbuild.builder.graph.passes.shapes import (
    cancelled_transposes,
    chained_reshapes,
    constant_reshapes,
)
from specbuild.plugins_cuda.linear.storage import BF16, storage_named

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
    role: str, *, weights_dtype: str = "bf16", coded_groups: Collection[str] = ()
) -> tuple[GraphPass, ...]:
    """The passes of a role's graph; the target's weights get the values of ``weights_dtype``.

    Keys and values of ``coded_groups`` are stored as codes.
    """
    asked = []
    storage = storage_named(weights_dtype)
    if role == "target" and storage is not BF16:
        asked.append(GraphPass("round-weights", partial(round_weights, storage=storage)))
    if coded_groups:
        asked.append(GraphPass("code-pools", partial(code_pools, groups=coded_groups)))
    merged = 1 + [a_pass.name for a_pass in CPU_PASSES].index("merge-projections")
    return (*CPU_PASSES[:merged], *asked, *CPU_PASSES[merged:])
