"""DSA: decides when a step attends to selected tokens, and when to everything.

A step is *sparse* if its context has reached the threshold. The first few of these steps, and then
every ``check_interval``-th, are checks. A check runs the launch twice, sparse and whole, and emits
the result of the whole pass. It compares the tokens sampled along the accepted path, and the number
of accepted draft tokens. While the agreement of the last checks is too low, steps attend to
everything (fallback). Checks continue, so that a sequence may recover. If a list of slots breaks an
invariant inside a launch, its layer attends to everything, and the list is counted here.

Rows below the threshold always attend to everything; the graph does this.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.engine_dir.manifest import Dsa
from specbuild.runtime.records import DsaStats

# The number of latest checks that decide the fallback, and the minimum before a decision.
FIRST_CHECKS, LAST_CHECKS = 8, 16
EVERYTHING = -1

Attends = Literal["whole", "sparse", "check", "fallback"]


@dataclass
class DsaCounters:
    """Counts of a request's DSA steps; :class:`DsaStats` describes each."""

    top_k: int
    narrowed_steps: int = 0
    checked_steps: int = 0
    fallback_steps: int = 0
    checked_tokens: int = 0
    agreed_tokens: int = 0
    accepted_narrowed: int = 0
    accepted_whole: int = 0
    broken_launches: int = 0
    broken_lists: int = 0

    def broken(self, lists: int) -> None:
        """Count the broken lists of a launch."""
        self.broken_launches += lists > 0
        self.broken_lists += lists

    def stats(self) -> DsaStats:
        """Return the statistics so far."""
        tokens = self.checked_tokens
        return DsaStats(agreement=self.agreed_tokens / tokens if tokens else None, **vars(self))


@dataclass(frozen=True)
class Check:
    """The comparison of a sparse and a whole pass over the same tree.

    ``tokens`` is the number of tokens that the whole pass emitted, ``agreed`` the number of these
    that the sparse pass sampled too. ``accepted_whole`` and ``accepted_narrowed`` are the draft
    tokens that each pass accepted.
    """

    tokens: int
    agreed: int
    accepted_whole: int
    accepted_narrowed: int


class SequenceSelection:
    """Decides how the steps of one sequence attend. With ``top_k`` 0 all attend to everything."""

    def __init__(self, config: Dsa, top_k: int) -> None:
        self.counters = DsaCounters(top_k)
        self._config = config
        self._checks: deque[Check] = deque(maxlen=LAST_CHECKS)
        self._checks_begun = self._steps_to_check = 0

    @property
    def budget(self) -> int:
        """The number of tokens that a sparse row may select."""
        return self.counters.top_k if self.counters.top_k > 0 else EVERYTHING

    def budget_of(self, attends: Attends, *, checking: bool = False) -> int:
        """Return the budget of a row; ``checking`` selects the sparse pass of a check."""
        # The deepest nodes of a tree may be at the threshold although its root is below it.
        sparse = attends in ("sparse", "whole") or (checking and attends == "check")
        return self.budget if sparse else EVERYTHING

    @property
    def is_agreement_low(self) -> bool:
        """Whether the last checks agree less than ``min_agreement``.

        Two shares must reach it: that of equal tokens, and that of the tokens that the sparse
        passes would have emitted. The second bounds how many accepted draft tokens they lose.
        """
        if len(self._checks) < FIRST_CHECKS:
            return False
        min_agreement = self._config.min_agreement
        tokens = sum(c.tokens for c in self._checks)
        emitted = sum(1 + c.accepted_narrowed for c in self._checks)
        whole = sum(1 + c.accepted_whole for c in self._checks)
        return (
            sum(c.agreed for c in self._checks) < min_agreement * tokens
            or emitted < min_agreement * whole
        )

    def begin(self, length: int) -> Attends:
        """Return how the step after ``length`` tokens attends; :meth:`ended` must follow."""
        if self.budget == EVERYTHING or length < self._config.threshold:
            return "whole"
        first = self._checks_begun < FIRST_CHECKS
        if self._config.check_interval and (first or self._steps_to_check == 0):
            self._steps_to_check = self._config.check_interval - 1
            self._checks_begun += 1
            return "check"
        self._steps_to_check -= 1
        return "fallback" if self.is_agreement_low else "sparse"

    def ended(self, attends: Attends, length: int, check: Check | None = None) -> None:
        """Record the end of a step, with the comparison if it was a check.

        The step may have started with an estimated length. If the actual ``length`` is below the
        threshold, all of its rows attended to everything and the step is not counted.
        """
        counters = self.counters
        if length < self._config.threshold:
            self._checks_begun -= attends == "check"
            return
        counters.narrowed_steps += attends == "sparse"
        counters.fallback_steps += attends == "fallback"
        if check is None:
            return
        self._checks.append(check)
        counters.checked_steps += 1
        counters.checked_tokens += check.tokens
        counters.agreed_tokens += check.agreed
        counters.accepted_narrowed += check.accepted_narrowed
        counters.accepted_whole += check.accepted_whole
