"""What ``bench modes`` found."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY


@dataclass(frozen=True)
class ModeEngine:
    """A mode's engine: its folder, whether it was built now, and what it takes.

    ``cache_bytes_per_token`` counts the groups that keep every token, the draft's too.
    """

    mode: str
    title: str
    engine: str
    built: bool
    weights_bytes: int
    cache_bytes_per_token: float


@dataclass(frozen=True)
class ModeRow:
    """A mode behind ``context`` tokens.

    ``tokens_per_s`` counts from the first token on, a median over the rounds; ``over_first`` is the
    median ratio to the first mode's in the same round. ``perplexity`` and ``agreement``, the share
    of tokens behind which the first mode has the same likeliest token, are over the judged ones.
    """

    mode: str
    context: int
    tokens_per_s: float
    over_first: float
    ttft_s: float
    tokens_per_step: float = field(metadata={FORMER_KEY: "tokens_a_step"})
    perplexity: float
    agreement: float


@dataclass(frozen=True)
class ModesReport:
    """What ``bench modes --json`` prints; the first of ``modes`` is what others stand beside.

    ``judged_tokens`` of the text behind each context, ``new_tokens`` decoded greedily there
    ``rounds`` times by each mode in turn.
    """

    model: str
    backend: str
    device: str
    judged_tokens: int
    new_tokens: int
    rounds: int
    modes: tuple[ModeEngine, ...]
    rows: tuple[ModeRow, ...]

    @property
    def contexts(self) -> tuple[int, ...]:
        """The contexts that were measured, in order."""
        return tuple(dict.fromkeys(row.context for row in self.rows))

    def row(self, mode: str, context: int) -> ModeRow:
        """The row of a mode and context."""
        return next(r for r in self.rows if (r.mode, r.context) == (mode, context))
