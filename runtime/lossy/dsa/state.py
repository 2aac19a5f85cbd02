"""DSA: when a step attends to what indexers choose, and when, and why, to everything.

A step is *sparse* where its context has reached the threshold. The first few of these, and
then every ``check_interval``-th, are checks: the launch runs twice, sparse and whole, and the
whole one counts. What is compared is the tokens sampled along the accepted path, and how many
drafts were accepted. While the last checks agree too little, steps attend to everything (fallback);
checks go on, so that a sequence may recover. Inside a launch, a list of slots that breaks an
invariant gives way to everything in its layer, which is counted here.

Rows below the threshold attend to everything in any case; the graph sees to that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.engine_dir.manifest import Dsa
from specbuild.runtime.records import DsaStats

# A sequence is judged by its last checks, and by no fewer than it begins with.
FIRST_CHECKS, LAST_CHECKS = 8, 16
EVERYTHING = -1

Attends = Literal["whole", "sparse", "check", "fallback"]


@dataclass
class DsaCounters:
    """What indexers did in a request; :class:`DsaStats` says what each count means."""

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
        """A launch had so many lists that broke an invariant."""
        self.broken_launches += lists > 0
        self.broken_lists += lists

    def stats(self) -> DsaStats:
        """The statistics so far."""
        tokens = self.checked_tokens
        return DsaStats(agreement=self.agreed_tokens / tokens if tokens else None, **vars(self))


@dataclass(frozen=True)
class Check:
    """What a sparse and a whole pass over the same tree gave.

    Of the ``tokens`` that the whole one emitted, the sparse one sampled ``agreed`` too; of the
    drafts they accepted ``accepted_whole`` and ``accepted_narrowed``.
    """

    tokens: int
    agreed: int
    accepted_whole: int
    accepted_narrowed: int


class SequenceSelection:
    """How one sequence's steps attend. ``top_k`` 0 attends to everything always."""

    def __init__(self, config: Dsa, top_k: int) -> None:
        self.counters = DsaCounters(top_k)
        self._config = config
        self._checks: deque[Check] = deque(maxlen=LAST_CHECKS)
        self._checks_begun = self._steps_to_check = 0

    @property
    def budget(self) -> int:
        """What a sparse row may choose."""
        return self.counters.top_k if self.counters.top_k > 0 else EVERYTHING

    def budget_of(self, attends: Attends, *, checking: bool = False) -> int:
        """What a row of a step may choose; ``checking``: in the pass that a check looks at."""
        # Below the threshold a tree's deepest nodes may have reached it.
        sparse = attends in ("sparse", "whole") or (checking and attends == "check")
        return self.budget if sparse else EVERYTHING

    @property
    def doubtful(self) -> bool:
        """Whether the last checks agree in less than the share that is asked for.

        That is of the tokens that both sampled, or of those that the sparse passes would have
        emitted: it also bounds how many accepted drafts they lose.
        """
        if len(self._checks) < FIRST_CHECKS:
            return False
        least = self._config.min_agreement
        tokens = sum(c.tokens for c in self._checks)
        emitted = sum(1 + c.accepted_narrowed for c in self._checks)
        whole = sum(1 + c.accepted_whole for c in self._checks)
        return sum(c.agreed for c in self._checks) < least * tokens or emitted < least * whole

    def begin(self, length: int) -> Attends:
        """How the step behind ``length`` tokens attends; :meth:`ended` is told of its end."""
        if self.budget == EVERYTHING or length < self._config.threshold:
            return "whole"
        first = self._checks_begun < FIRST_CHECKS
        if self._config.check_interval and (first or self._steps_to_check == 0):
            self._steps_to_check = self._config.check_interval - 1
            self._checks_begun += 1
            return "check"
        self._steps_to_check -= 1
        return "fallback" if self.doubtful else "sparse"

    def ended(self, attends: Attends, length: int, check: Check | None = None) -> None:
        """A step is through; a ``check`` with what came of it.

        Where ``length`` was not known when it was begun it may stand below the threshold: then its
        rows saw everything, whatever it was begun as, and it counts for nothing.
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
