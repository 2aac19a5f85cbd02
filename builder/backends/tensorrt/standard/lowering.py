"""The TensorRT-RTX lowering: portable graphs to graphs of standard ops, as a list of passes.

Activations keep the checkpoint's type, pools have the axes (kv_heads, pages, page_size, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specbuild.builder.backends.tensorrt.standard.ops import (
    FP4,
    INT8,
    ExpertStorage,
    lower_standard,
)
from specbuild.builder.graph.passes.cleanup import merge_equal, remove_unused
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.graph.passes.pools import reorder_pools
from specbuild.builder.graph.passes.shapes import (
    cancelled_transposes,
    chained_reshapes,
    constant_reshapes,
)

_WITH_E2M1 = ("sm_120", "sm_121")


def standard_passes(storage: ExpertStorage) -> tuple[GraphPass, ...]:
    """The passes of every role, for engines whose GPUs hold experts like this."""
    return (
        GraphPass("constant-reshapes", constant_reshapes),
        GraphPass("reorder-pools", reorder_pools),
        GraphPass("standard-ops", partial(lower_standard, storage=storage)),
        GraphPass("cancel-transposes", cancelled_transposes),
        GraphPass("remove-unused", remove_unused),
        GraphPass("chain-reshapes", chained_reshapes),
        GraphPass("merge-equal", merge_equal),
        GraphPass("remove-unused-again", remove_unused),
    )


def expert_storage(capabilities: Sequence[str]) -> ExpertStorage:
    """Four bits where every GPU has e2m1, else eight; both hold MXFP4 exactly."""
    return FP4 if set(capabilities) <= set(_WITH_E2M1) else INT8
