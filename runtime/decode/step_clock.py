"""How the time of the host's steps is shared: drafting, and everything else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepClock:
    """Seconds of ``steps`` so far: ``draft_s`` proposing, ``verify_s`` verifying and accepting.

    What a draft takes up of the target's states counts as proposing. Only the thread that steps
    writes it.
    """

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def since(self, before: StepClock) -> StepClock:
        """What came to an earlier state of this clock."""
        return StepClock(
            self.steps - before.steps,
            self.draft_s - before.draft_s,
            self.verify_s - before.verify_s,
        )
