"""What an engine's own step programs cost, by its table of step costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specbuild.runtime.decode.program_table import ProgramTable
from specbuild.runtime.draft.costs import Outlook
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.engine_dir.manifest import DraftShape

# Contexts within so many tokens cost the same: attention is a small part of a step.
_CONTEXT_STEP = 256


class ProgramCosts:
    """The drafts that were measured and that the engine has steps for.

    Full logits, where they are written, cost every step the same and change no choice: a run's
    own times correct for them.
    """

    row_s = 0.0

    def __init__(self, costs: StepCosts, programs: ProgramTable, *, full_logits: bool) -> None:
        most = {s: programs.most_sequences(s, full_logits=full_logits) for s in programs.shapes()}
        self.shapes = tuple(s for s in costs.shapes() if most.get(s, 0) > 0)
        self.origin = f"measured on {costs.gpu}"
        self._most: list[tuple[DraftShape, int]] = [(s, most[s]) for s in self.shapes]
        self._costs = costs
        self._known: dict[tuple[int, int], list[float]] = {}

    def step_s(self, outlook: Outlook) -> Sequence[float]:
        """Seconds of a step without a draft, then with each of ``shapes``."""
        key = (outlook.batch, outlook.context // _CONTEXT_STEP)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._looked_up(*key)
        return found

    def _looked_up(self, batch: int, context_step: int) -> list[float]:
        context = (context_step + 0.5) * _CONTEXT_STEP
        # Every engine has steps without a draft for its largest batch: the table goes on there.
        largest = self._costs.batches(None)[-1]
        plain_s = self._costs.step_s(None, batch=min(batch, largest), context=context)
        assert plain_s is not None
        found = [plain_s]
        for shape, most in self._most:
            step_s = self._costs.step_s(shape, batch=batch, context=context)
            found.append(inf if step_s is None or batch > most else step_s)
        return found
