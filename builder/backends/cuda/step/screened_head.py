"""The screened form of the target's head: weights that are derived from the packed one."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.builder.backends.cuda.step.fused_graph import WeightTensors
from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.builder.graph.passes.weights import derived, recipe_of
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened

_FORMS = {"codes": screened, "errors": screen_errors}


def screen_tensors(weights: WeightTensors, weight: ir.Value) -> dict[str, Tensor]:
    """HeadScreen's ``codes`` and ``errors`` of a packed bf16 weight, stored beside it."""
    recipe = recipe_of(weight)
    assert recipe is not None
    return {
        name: weights.tensor(f"{weight.name}.{name}", derived([recipe], form))
        for name, form in _FORMS.items()
    }
