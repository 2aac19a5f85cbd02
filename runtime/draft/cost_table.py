"""The cost of a step by its rows, and the cost that drafting adds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

# Times that differ by more than this share of the shortest are unreliable.
SPREAD = 0.1


@dataclass(frozen=True)
class CostTable:
    """Seconds of a target step by rows, and seconds that drafting a chain adds, by its depth.

    ``target_s[i]`` is the time of ``target_rows[i]`` rows (rising), in consecutive steps.
    ``draft_s[d − 1]`` is the time of a step with a chain of d, drafting and accepting included,
    minus that of d + 1 target rows. It includes the cost of evicting the target's weights from the
    CPU's caches. ``row_s`` is the time in which the draft ingests one prompt token. ``sure`` is
    false if the measurement was disturbed.
    """

    target_rows: tuple[int, ...]
    target_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    row_s: float = 0.0
    sure: bool = True

    def step_s(self, rows: int) -> float:
        """Return a target step's time: interpolated, or extrapolated with the last slope."""
        known = self.target_rows
        if len(known) == 1 or rows <= known[0]:
            return self.target_s[0] * max(1.0, rows / known[0])
        right = min(max(bisect_left(known, rows), 1), len(known) - 1)
        left = right - 1
        slope = (self.target_s[right] - self.target_s[left]) / (known[right] - known[left])
        return self.target_s[left] + max(slope, 0.0) * (rows - known[left])

    def chain_s(self, depth: int) -> float:
        """Return the time that a chain adds."""
        return self.draft_s[min(depth, len(self.draft_s)) - 1] if depth else 0.0

    def least(self, other: CostTable) -> CostTable:
        """Return the shorter times; they are ``sure`` if these are, or if both nearly agree."""
        if (self.target_rows, len(self.draft_s)) != (other.target_rows, len(other.draft_s)):
            return self
        pairs = list(zip(self.target_s, other.target_s, strict=True))
        drafts = list(zip(self.draft_s, other.draft_s, strict=True))
        # Draft times are differences of two step times: compare them to a step's time.
        apart = [abs(a - b) / min(self.target_s[0], other.target_s[0]) for a, b in pairs + drafts]
        return replace(
            self,
            target_s=tuple(map(min, pairs)),
            draft_s=tuple(map(min, drafts)),
            row_s=min(self.row_s, other.row_s),
            sure=self.sure or max(apart) <= SPREAD,
        )
