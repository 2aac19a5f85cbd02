"""What the steps of a CUDA engine draft, as a plan's interpreter runs them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.runtime.engine_dir.plan import OpCall


@dataclass
class Drafted:
    """What a draft gave last: logits [B·D, Vd] of its levels, and TreeSelect's trees."""

    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    trees: dict[str, torch.Tensor] = field(default_factory=dict)

    def paths(self, b: int) -> set[tuple[int, ...]]:
        """Those of the nodes of sequence ``b``."""
        tokens, parents = self.trees["tree_tokens"][b], self.trees["tree_parents"][b]
        found: list[tuple[int, ...]] = [()]
        for slot in range(1, int(self.trees["count"][b])):
            found.append((*found[int(parents[slot])], int(tokens[slot])))
        return set(found[1:])


def watched(patch: pytest.MonkeyPatch) -> Drafted:
    """Filled by every step that an interpreter runs from now on."""
    seen, call_op = Drafted(), PlanInterpreter._call

    def spy(self: PlanInterpreter, call: OpCall) -> None:
        call_op(self, call)
        if call.op == "TreeExpand":
            seen.logits = self._tensor(call.inputs["logits"]).clone()
        if call.op == "TreeSelect":
            seen.trees = {n: self._tensor(of).clone() for n, of in call.outputs.items()}

    patch.setattr(PlanInterpreter, "_call", spy)
    return seen
