"""Costs of an engine's step programs, from its table of step costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.proposals import likeliest_depths
from specbuild.runtime.draft.costs import StepContext, StepTimes
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.draft.draft_models import model_of
from specbuild.runtime.draft.host_proposal import ProposedDepths
from specbuild.runtime.draft.policy import StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape

# Costs are cached per interval of this many context tokens: attention is a small part of a step.
_CONTEXT_INTERVAL = 256
# Prior for the host time between the tokens of a step and the next launch.
_HOST_S = 150e-6


class ProgramCosts:
    """Costs of the drafts that were measured and have step programs, ragged ones last.

    ``models`` are names of draft models, as shapes have them; the only model's name is empty.
    ``origin`` states where the costs come from, if they were not measured on a GPU. Full logits
    cost every step the same and change no choice; the policy corrects for them with measured times.
    """

    def __init__(
        self,
        costs: StepCosts,
        programs: ProgramTable,
        *,
        full_logits: bool,
        models: Sequence[str] = ("",),
        origin: str = "",
    ) -> None:
        every = (*programs.shapes(), *programs.ragged_shapes())
        shapes = [shape for shape in every if model_of(shape) in models]
        max_batch = {s: programs.max_sequences(s, full_logits=full_logits) for s in shapes}
        measured = (*costs.shapes(), *costs.ragged_shapes())
        self.shapes = tuple(s for s in measured if max_batch.get(s, 0) > 0)
        self.origin = origin or f"measured on {costs.gpu}"
        self._batches = [
            (s, range(programs.min_sequences(s), max_batch[s] + 1)) for s in self.shapes
        ]
        self._costs = costs
        self._cache: dict[tuple[int, int, int], list[float]] = {}

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Return the seconds of a step without a draft, then with each of ``shapes``."""
        batch = step_context.batch
        rows = max(batch, step_context.rows)
        key = (batch, rows, step_context.context // _CONTEXT_INTERVAL)
        seconds = self._cache.get(key)
        if seconds is None:
            seconds = self._cache[key] = self._read_table(*key)
        return seconds

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:  # noqa: ARG002
        """Return 0: a device's draft ingests the tokens of every step."""
        return 0.0

    def _read_table(self, batch: int, rows: int, context_interval: int) -> list[float]:
        context = (context_interval + 0.5) * _CONTEXT_INTERVAL
        # Every engine has steps without a draft for its largest batch, beyond the table's batches.
        largest = self._costs.batches(None)[-1]
        plain_s = self._costs.step_s(None, batch=min(batch, largest), context=context)
        assert plain_s is not None
        seconds = [plain_s]
        for shape, batches in self._batches:
            step_s = self._costs.step_s(shape, batch=batch, context=context)
            # A program needs capacity for all rows up to the last one that takes part.
            fits = batch in batches and rows in batches
            seconds.append(step_s if fits and step_s is not None else inf)
        return seconds


class ProposalCosts:
    """Costs of steps that verify host chains. A program has rows for a mean length of chains.

    Before such a step the device waits for the host. Measured times include this wait. They correct
    the table's times per chain length.
    """

    def __init__(self, costs: StepCosts, programs: ProgramTable, *, full_logits: bool) -> None:
        self._costs, self._programs, self._full_logits = costs, programs, full_logits
        self._time_index = {0: 0} | {
            length: kind for kind, length in enumerate(self._lengths(1), start=1)
        }
        self._times = StepTimes([None, *[""] * (len(self._time_index) - 1)])
        self._cache: dict[tuple[int, int, int], float | None] = {}

    def best(self, step_context: StepContext, ratio: float) -> tuple[tuple[int, ...], float]:
        """See ``HostProposalCosts``."""
        batch, cumulative_probs = step_context.batch, step_context.cumulative_probs
        best, best_rate = (0,) * batch, 0.0
        for length in self._lengths(batch):
            table_s = self._table_s(length, step_context)
            if table_s is None:
                continue
            step_s = self._step_s(length, table_s * ratio)
            depths = self._depths(length, cumulative_probs)
            accepted = sum(sum(c[:d]) for c, d in zip(cumulative_probs, depths, strict=True))
            rate = (batch + accepted) / (batch * step_s)
            if rate > best_rate:
                best, best_rate = tuple(depths), rate
        return best, best_rate

    def _depths(self, length: int, cumulative_probs: Sequence[Sequence[float]]) -> list[int]:
        """Return the depths of chains in the smallest program with this mean length."""
        batch = len(cumulative_probs)
        lengths = [length] * batch
        entry = self._programs.host_chain_step(lengths, batch=batch, full_logits=self._full_logits)
        chains = [chain[: entry.draft_tokens] for chain in cumulative_probs]
        return likeliest_depths(chains, entry.rows - batch if entry.is_ragged else batch * length)

    def learn(self, outcome: StepOutcome, ratio: float) -> None:
        """See ``HostProposalCosts``."""
        assert isinstance(outcome.shape, ProposedDepths) and outcome.step_s
        batch, depths = outcome.step_context.batch, outcome.shape.depths
        entry = self._programs.host_chain_step(depths, batch=batch, full_logits=self._full_logits)
        length = entry.rows // entry.batch - 1
        table_s = self._table_s(length, outcome.step_context)
        if table_s is not None:
            expected_s = table_s * ratio + _HOST_S
            self._times.learn(self._time_index[length], outcome.step_s / expected_s)

    def _lengths(self, batch: int) -> tuple[int, ...]:
        return self._programs.host_chain_lengths(batch=batch, full_logits=self._full_logits)

    def _table_s(self, length: int, step_context: StepContext) -> float | None:
        key = (length, step_context.batch, step_context.context // _CONTEXT_INTERVAL)
        if key not in self._cache:
            context = (key[2] + 0.5) * _CONTEXT_INTERVAL
            self._cache[key] = self._costs.step_s(
                DraftShape(1, length, length), batch=key[1], context=context, host_proposal=True
            )
        return self._cache[key]

    def _step_s(self, length: int, program_s: float) -> float:
        return (program_s + _HOST_S) * self._times.ratios()[self._time_index[length]]
