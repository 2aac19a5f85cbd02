"""Time that the host spends on drafting, and on the rest of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepClock:
    """Seconds spent so far, in ``steps`` steps: ``draft_s`` drafting, ``verify_s`` for everything
    else.

    Drafting includes ingesting the target's hidden states into the draft. Only the decoding thread
    writes it.
    """

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def since(self, before: StepClock) -> StepClock:
        """Return the difference to an earlier state of this clock."""
        return StepClock(
            self.steps - before.steps,
            self.draft_s - before.draft_s,
            self.verify_s - before.verify_s,
        )
