"""A host for the interpreter of a plan on all ranks of an engine at once."""

from __future__ import annotations

from functools import partial

import torch
from plan_host import PlanHost, stored

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter, run_in_lockstep
from specbuild.builder.graph.passes.weights import Recipe


def part_of(recipe: Recipe, rank: int) -> torch.Tensor:
    """Return the part of a tensor that a rank stores."""
    return stored(recipe)[rank] if recipe.ranks > 1 else stored(recipe)


class RankHost(PlanHost):
    """The rows of sequences on the interpreted ranks of an engine.

    The host writes to rank 0. Before a program runs, the other ranks get the same values.
    Afterwards every state must be the same on all ranks, bit for bit.
    """

    def __init__(self, engine: LoweredEngine) -> None:
        super().__init__(engine)
        weights = engine.weights

        def weight(name: str, rank: int) -> torch.Tensor:
            return part_of(weights[name], rank)

        ranks = range(engine.engine_sizes.ranks)
        self.memories = [PlanInterpreter(self.plan, partial(weight, rank=rank)) for rank in ranks]
        self.memory = self.memories[0]
        self.port("done").fill_(1)

    def run(self, name: str) -> None:
        """Run a program by name on every rank."""
        if name not in self._programs:
            lowered = next(low for entry, low in self.engine.programs if entry.name == name)
            self._programs[name] = self.engine.writer.program(lowered)
        for other in self.memories[1:]:
            for state in self._shared():
                other.buffer(state).copy_(self.memory.buffer(state))
        run_in_lockstep(self.memories, self._programs[name])
        for rank, other in enumerate(self.memories[1:], start=1):
            for state in self._shared():
                same = torch.equal(other.buffer(state), self.memory.buffer(state))
                assert same, f"rank {rank} has another {state} than rank 0 after {name}"

    def _shared(self) -> list[str]:
        """Return the buffers that are equal on all ranks between programs."""
        return [b.name for b in self.plan.buffers if b.space in ("state", "ring")]
