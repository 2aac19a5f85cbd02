"""The drafts of the steps of a CUDA engine, as the interpreter of a plan runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.runtime.engine_dir.plan import OpCall


@dataclass
class Drafted:
    """The last drafts: logits of the passes, and the trees of TreeSelect.

    ``levels`` are the logits [B·F, Vd] of the nodes of each level of a recurrent draft. ``logits``
    [B·D, Vd] are those of the last pass.
    """

    levels: list[torch.Tensor] = field(default_factory=list)
    trees: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def logits(self) -> torch.Tensor:
        """Return the logits of the last pass. In a one-pass draft these are of all levels."""
        return self.levels[-1]

    def paths(self, b: int) -> set[tuple[int, ...]]:
        """Return the paths of the nodes of sequence ``b``."""
        tokens, parents = self.trees["tree_tokens"][b], self.trees["tree_parents"][b]
        found: list[tuple[int, ...]] = [()]
        for slot in range(1, int(self.trees["count"][b])):
            found.append((*found[int(parents[slot])], int(tokens[slot])))
        return set(found[1:])


def watched(patch: pytest.MonkeyPatch) -> Drafted:
    """Return a record that every later step of an interpreter fills."""
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
