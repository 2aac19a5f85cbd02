"""What a step costs by its rows, and what drafting adds to it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

# Times that are further apart than this share of the shortest were disturbed.
SPREAD = 0.1


@dataclass(frozen=True)
class CostTable:
    """Seconds of a target step by rows, and what drafting a chain adds to one, by its depth.

    ``target_s[i]`` belongs to ``target_rows[i]`` (rising), one such step after the other;
    ``draft_s[d − 1]`` is a step with a chain of d, drafting and accepting included, less the
    time of d + 1 target rows: the draft also pushes the target's weights out of the CPU's caches.
    ``row_s`` is the time in which the draft takes up one token of a prompt. Not ``sure`` is what
    was measured while something disturbed it.
    """

    target_rows: tuple[int, ...]
    target_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    row_s: float = 0.0
    sure: bool = True

    def step_s(self, rows: int) -> float:
        """A target step's time: interpolated, and past the table along its last slope."""
        known = self.target_rows
        if len(known) == 1 or rows <= known[0]:
            return self.target_s[0] * max(1.0, rows / known[0])
        right = min(max(bisect_left(known, rows), 1), len(known) - 1)
        left = right - 1
        slope = (self.target_s[right] - self.target_s[left]) / (known[right] - known[left])
        return self.target_s[left] + max(slope, 0.0) * (rows - known[left])

    def chain_s(self, depth: int) -> float:
        """Time to draft a chain."""
        return self.draft_s[min(depth, len(self.draft_s)) - 1] if depth else 0.0

    def least(self, other: CostTable) -> CostTable:
        """The shorter of both times, sure where this one is or both nearly agree."""
        if (self.target_rows, len(self.draft_s)) != (other.target_rows, len(other.draft_s)):
            return self
        pairs = list(zip(self.target_s, other.target_s, strict=True))
        drafts = list(zip(self.draft_s, other.draft_s, strict=True))
        # What drafting adds is a difference of two times: it counts by what it changes of a step.
        apart = [abs(a - b) / min(self.target_s[0], other.target_s[0]) for a, b in pairs + drafts]
        return replace(
            self,
            target_s=tuple(map(min, pairs)),
            draft_s=tuple(map(min, drafts)),
            row_s=min(self.row_s, other.row_s),
            sure=self.sure or max(apart) <= SPREAD,
        )
