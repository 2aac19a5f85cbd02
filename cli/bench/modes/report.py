"""The report of ``bench modes``."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY


@dataclass(frozen=True)
class ModeEngine:
    """A mode's engine: its folder, whether it was built now, and its sizes.

    ``cache_bytes_per_token`` counts the groups without a window, including the draft's.
    """

    mode: str
    title: str
    engine: str
    built: bool
    weights_bytes: int
    cache_bytes_per_token: float


@dataclass(frozen=True)
class ModeRow:
    """A mode after ``context`` tokens.

    ``tokens_per_s`` counts from the first token, the median over rounds; ``over_first`` is the
    median ratio to the first mode in the same round. ``perplexity`` and ``agreement`` are over the
    evaluated tokens; ``agreement`` is the share of positions at which the first mode has the same
    likeliest token.
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
    """The output of ``bench modes --json``; the others are compared with the first of ``modes``.

    After each context ``judged_tokens`` of the text are evaluated, and ``new_tokens`` are decoded
    greedily, ``rounds`` times by each mode in turn.
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
        """The measured contexts, in order."""
        return tuple(dict.fromkeys(row.context for row in self.rows))

    def row(self, mode: str, context: int) -> ModeRow:
        """Return the row of a mode and context."""
        return next(r for r in self.rows if (r.mode, r.context) == (mode, context))
