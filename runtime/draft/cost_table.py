"""The time of a target step by its rows, and the time that drafting a chain adds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

# Two measurements agree if their times differ by at most this share of the shortest step.
SPREAD = 0.1


@dataclass(frozen=True)
class CostTable:
    """Seconds of a target step by rows, and seconds that drafting a chain adds, by its depth.

    ``target_s[i]`` is the time of a step of ``target_rows[i]`` rows, measured in consecutive steps;
    the rows ascend. ``draft_s[d − 1]`` is the time that drafting and accepting a chain of d tokens
    adds to a target step of d + 1 rows. It includes the cost of evicting the target's weights from
    the CPU's caches. ``row_s`` is the time in which the draft ingests one prompt token. ``sure`` is
    false if the measurement was disturbed.
    """

    target_rows: tuple[int, ...]
    target_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    row_s: float = 0.0
    sure: bool = True

    def step_s(self, rows: int) -> float:
        """Return a target step's time, interpolated or extrapolated with the last slope."""
        measured = self.target_rows
        if len(measured) == 1 or rows <= measured[0]:
            return self.target_s[0] * max(1.0, rows / measured[0])
        right = min(max(bisect_left(measured, rows), 1), len(measured) - 1)
        left = right - 1
        slope = (self.target_s[right] - self.target_s[left]) / (measured[right] - measured[left])
        return self.target_s[left] + max(slope, 0.0) * (rows - measured[left])

    def chain_s(self, depth: int) -> float:
        """Return the time that drafting a chain of ``depth`` tokens adds; 0 without a chain."""
        return self.draft_s[min(depth, len(self.draft_s)) - 1] if depth else 0.0

    def least(self, other: CostTable) -> CostTable:
        """Return a table with the shorter time of each entry of two measurements.

        The result is ``sure`` if this table is, or if the two measurements nearly agree. If their
        entries differ in number or rows, return this table.
        """
        if (self.target_rows, len(self.draft_s)) != (other.target_rows, len(other.draft_s)):
            return self
        pairs = list(zip(self.target_s, other.target_s, strict=True))
        drafts = list(zip(self.draft_s, other.draft_s, strict=True))
        # Draft times are differences of two step times: relate them to a step's time.
        deviations = [
            abs(a - b) / min(self.target_s[0], other.target_s[0]) for a, b in pairs + drafts
        ]
        return replace(
            self,
            target_s=tuple(map(min, pairs)),
            draft_s=tuple(map(min, drafts)),
            row_s=min(self.row_s, other.row_s),
            sure=self.sure or max(deviations) <= SPREAD,
        )
