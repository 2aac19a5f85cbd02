"""What ``bench drafters`` found."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY


@dataclass(frozen=True)
class DrafterRow:
    """A drafter that decodes ``batch`` sequences behind ``context`` tokens each.

    ``tokens_per_s`` is that of all sequences together, from the last first token to the end, a
    median over the rounds; ``ratio`` is the median over no draft's in the same round. ``draft_s``
    and ``verify_s`` are of a step, None where steps do not run on the host.
    """

    drafter: str
    batch: int
    context: int
    tokens_per_step: float = field(metadata={FORMER_KEY: "tokens_a_step"})
    draft_s: float | None
    verify_s: float | None
    tokens_per_s: float
    ratio: float
    same_output: bool


@dataclass(frozen=True)
class DraftersReport:
    """What ``bench drafters --json`` prints: ``new_tokens`` of every sequence, greedily."""

    backend: str
    device: str
    text: str
    new_tokens: int
    rounds: int
    rows: tuple[DrafterRow, ...]

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that were measured, in order."""
        return tuple(dict.fromkeys(row.drafter for row in self.rows))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches that were measured, in order."""
        return tuple(dict.fromkeys(row.batch for row in self.rows))
