"""Statistics of requests, and of the time that steps take."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from specbuild.runtime.lossy.dsa.state import DsaCounters
from specbuild.runtime.lossy.specpv.state import SpecPvCounters
from specbuild.runtime.records import RunStats


class RunCounters:
    """Counts while a request runs. Its clock starts when the request is admitted.

    An accepted draft counts when its token was emitted: drafts behind an end of sequence or a
    stop string do not. The loop counts ``preemptions``, ``paused_steps``, ``cached_tokens``, and
    ``masked_tokens`` where there is a guide.
    ``specpv`` is set where steps may verify over partial views, ``dsa`` where they may attend to
    chosen tokens.
    """

    def __init__(self, max_depth: int) -> None:
        self._histogram = [0] * (max_depth + 1)
        self._started_s = perf_counter()
        self._first_s = self._last_s = self._started_s
        self._tokens = 0
        self._step_tokens = 0
        self._proposed = 0
        self.preemptions = 0
        self.paused_steps = 0
        self.cached_tokens = 0
        self.masked_tokens: int | None = None
        self.specpv: SpecPvCounters | None = None
        self.dsa: DsaCounters | None = None

    def first_token(self) -> None:
        """The prefill gave its token."""
        self._tokens = 1
        self._first_s = self._last_s = perf_counter()

    def mask(self, tokens: int) -> None:
        """So many tokens became others because of a guide."""
        self.masked_tokens = (self.masked_tokens or 0) + tokens

    def step(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """One target pass emitted ``emitted`` tokens, ``accepted`` of ``proposed`` drafts."""
        self._histogram[accepted] += 1
        self._proposed += proposed
        self._step_tokens += emitted
        self._tokens += emitted
        if emitted:
            self._last_s = perf_counter()

    def stats(self, prompt_tokens: int) -> RunStats:
        """The statistics so far."""
        steps = sum(self._histogram)
        more_than = [sum(self._histogram[i + 1 :]) for i in range(len(self._histogram) - 1)]
        total_s = self._last_s - self._started_s
        gaps = self._tokens - 1
        return RunStats(
            prompt_tokens=prompt_tokens,
            output_tokens=self._tokens,
            steps=steps,
            mean_acceptance_length=self._step_tokens / steps if steps else 1.0,
            acceptance_histogram=tuple(self._histogram),
            acceptance_per_position=tuple(n / steps if steps else 0.0 for n in more_than),
            ttft_s=self._first_s - self._started_s,
            tpot_s=(self._last_s - self._first_s) / gaps if gaps > 0 else None,
            output_tokens_per_s=self._tokens / total_s if total_s > 0 else 0.0,
            preemptions=self.preemptions,
            paused_steps=self.paused_steps,
            cached_tokens=self.cached_tokens,
            proposed_tokens=self._proposed,
            masked_tokens=self.masked_tokens,
            specpv=None if self.specpv is None else self.specpv.stats(),
            dsa=None if self.dsa is None else self.dsa.stats(),
        )


@dataclass
class StepClock:
    """Seconds spent so far, in ``steps`` steps: ``draft_s`` drafting, ``verify_s`` for everything
    else.

    Drafting includes ingesting the target's hidden states into the draft. Only the decoding thread
    writes it.
    """

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def since(self, before: StepClock) -> StepClock:
        """Return the difference to an earlier state of this clock."""
        return StepClock(
            self.steps - before.steps,
            self.draft_s - before.draft_s,
            self.verify_s - before.verify_s,
        )
