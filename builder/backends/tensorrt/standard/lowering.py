"""The TensorRT-RTX lowering: the list of passes from portable graphs to graphs of standard ops.

Activations keep the checkpoint's dtype. Pools have the axes (kv_heads, pages, page_size, width).
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
    """Return the passes of every role; ``storage`` is the format of quantized experts."""
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
    """Return 4 bits if every GPU supports e2m1, else 8. Both represent MXFP4 exactly."""
    return FP4 if set(capabilities) <= set(_WITH_E2M1) else INT8
