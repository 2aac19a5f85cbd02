"""The report of ``bench drafters``."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY


@dataclass(frozen=True)
class DrafterRow:
    """A drafter that decodes ``batch`` sequences after ``context`` tokens each.

    ``tokens_per_s`` is that of all sequences, from the last first token to the end, the median over
    rounds. ``ratio`` is the median ratio to decoding without a draft in the same round. ``draft_s``
    and ``verify_s`` are per step, None if steps do not run on the host.
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
    """The output of ``bench drafters --json``: ``new_tokens`` of every sequence, greedily."""

    backend: str
    device: str
    text: str
    new_tokens: int
    rounds: int
    rows: tuple[DrafterRow, ...]

    @property
    def drafters(self) -> tuple[str, ...]:
        """The measured contexts, in order."""
        return tuple(dict.fromkeys(row.drafter for row in self.rows))

    @property
    def batches(self) -> tuple[int, ...]:
        """The measured batches, in order."""
        return tuple(dict.fromkeys(row.batch for row in self.rows))
