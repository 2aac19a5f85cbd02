"""The screened form of the target's head: weights that are derived from the packed one."""

from __future__ import annotations

from specbuild.builder.backends.cuda.step.fused_graph import WeightTensors
from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.builder.graph.passes.weights import Recipe, derived
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened

_FORMS = {"codes": screened, "errors": screen_errors}


def screen_tensors(weights: WeightTensors, name: str, recipe: Recipe) -> dict[str, Tensor]:
    """HeadScreen's ``codes`` and ``errors`` of the packed bf16 weight ``name``, stored beside it.

    Of a weight whose tiles ranks share, each has those of its own.
    """
    return {
        kind: weights.tensor(f"{name}.{kind}", derived([recipe], form))
        for kind, form in _FORMS.items()
    }
