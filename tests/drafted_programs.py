"""What the steps of a CUDA engine draft, as a plan's interpreter runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.runtime.engine_dir.plan import OpCall


@dataclass
class Drafted:
    """What a draft gave last: the logits of its passes, and TreeSelect's trees.

    ``levels`` are those of a draft that recurs, [B·F, Vd] of the nodes of each level; ``logits``
    [B·D, Vd] of the last pass.
    """

    levels: list[torch.Tensor] = field(default_factory=list)
    trees: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def logits(self) -> torch.Tensor:
        """Those of the last pass, which are all levels' in a draft of one pass."""
        return self.levels[-1]

    def paths(self, b: int) -> set[tuple[int, ...]]:
        """Those of the nodes of sequence ``b``."""
        tokens, parents = self.trees["tree_tokens"][b], self.trees["tree_parents"][b]
        found: list[tuple[int, ...]] = [()]
        for slot in range(1, int(self.trees["count"][b])):
            found.append((*found[int(parents[slot])], int(tokens[slot])))
        return set(found[1:])


def watched(patch: pytest.MonkeyPatch) -> Drafted:
    """Filled by every step that an interpreter runs from now on."""
    seen, call_op = Drafted(), PlanInterpreter.call
    passes: list[torch.Tensor] = []

    def spy(self: PlanInterpreter, call: OpCall, *contributions: Sequence[torch.Tensor]) -> None:
        call_op(self, call, *contributions)
        if call.op == "TreeExpand":
            passes.append(self._tensor(call.inputs["logits"]).clone())
        if call.op == "TreeSelect":
            seen.levels = [*passes]
            passes.clear()
            seen.trees = {n: self._tensor(of).clone() for n, of in call.outputs.items()}

    patch.setattr(PlanInterpreter, "call", spy)
    return seen
