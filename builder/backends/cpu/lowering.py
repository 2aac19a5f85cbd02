"""The CPU lowering: portable graphs to ONNX Runtime graphs, as a readable list of passes."""

from __future__ import annotations

from specbuild.builder.backends.cpu.bodies import lower_ops
from specbuild.builder.backends.cpu.norms import fuse_norms
from specbuild.builder.backends.cpu.projections import merge_projections
from specbuild.builder.backends.cpu.retype import retype_to_fp32
from specbuild.builder.graph.passes.cleanup import merge_equal, remove_unused
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.graph.passes.pools import reorder_pools
from specbuild.builder.graph.passes.shapes import (
    cancelled_transposes,
    chained_reshapes,
    constant_reshapes,
)

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
