"""What launches cost an engine: whole prompts by their tokens, and steps by batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, isfinite

from specbuild.runtime.decode.scheduler import prompt_launches
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import ShapeCosts, interpolated, measured_shapes
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

# Contexts within so many tokens cost the same: they are looked up once.
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class ServingCosts:
    """Measured on ``machine``; a launch of prompts had ``chunk_rows`` rows at most.

    ``prompt_s[i]`` is one prompt of ``prompt_tokens[i]`` (rising), alone, to its first token.
    ``steps`` are whole steps, those without a draft among them.
    """

    machine: str
    chunk_rows: int
    prompt_tokens: tuple[int, ...]
    prompt_s: tuple[float, ...]
    steps: tuple[ShapeCosts, ...]

    def __post_init__(self) -> None:
        times = [*self.prompt_s, *(time_s for entry in self.steps for time_s in entry.step_s)]
        sound = (
            len(self.prompt_tokens) == len(self.prompt_s) > 0
            and all(a < b for a, b in pairwise(self.prompt_tokens))
            and min(self.chunk_rows, self.prompt_tokens[0]) > 0
            and all(isfinite(time_s) and time_s > 0 for time_s in times)
            and any(entry.shape is None for entry in self.steps)
            and all(len(e.contexts) == len(e.step_s) > 0 for e in self.steps)
        )
        if not sound:
            raise SpecbuildError(
                "the costs are malformed: they need prompts with rising tokens, steps without a "
                "draft, and times above 0"
            )

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every draft that was measured: see :func:`measured_shapes`."""
        return measured_shapes(self.steps)

    def prompts_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of one launch; chunks are (tokens before them, rows).

        A launch of so many rows takes what a prompt of as many does; a row behind others takes
        more by each token that it sees, as prompts of several launches tell.
        """
        rows = sum(count for _, count in chunks)
        seen = sum(start * count for start, count in chunks)
        return self._launch_s(rows) + seen * self._seen_s

    def step_s(self, shape: DraftShape | None, *, batch: int, context: float) -> float | None:
        """Seconds of a whole step, between what was measured; None where there is none.

        Beyond the largest batch that was measured the last slope goes on.
        """
        by_batch = {entry.batch: entry for entry in self.steps if entry.shape == shape}
        if not by_batch:
            return None
        batches = sorted(by_batch)
        return interpolated(batches, [by_batch[b].step_at(context) for b in batches], batch)

    @cached_property
    def _single(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Prompts that are one launch; the shortest where none is."""
        alone = [
            pair
            for pair in zip(self.prompt_tokens, self.prompt_s, strict=True)
            if len(prompt_launches(pair[0], self.chunk_rows)) == 1
        ]
        tokens, times = zip(*alone or [(self.prompt_tokens[0], self.prompt_s[0])], strict=True)
        return tokens, times

    def _launch_s(self, rows: int) -> float:
        return interpolated(*self._single, rows)

    @cached_property
    def _seen_s(self) -> float:
        """Seconds that each token seen adds to a row, by the longest prompt of several launches."""
        tokens, time_s = self.prompt_tokens[-1], self.prompt_s[-1]
        counts = prompt_launches(tokens, self.chunk_rows)
        starts = accumulate(counts, initial=0)
        seen = sum(start * count for start, count in zip(starts, counts, strict=False))
        if not seen:
            return 0.0
        return max(0.0, time_s - sum(map(self._launch_s, counts))) / seen


class ServingDraftCosts:
    """The drafts of such a table, for the policy that chooses among them."""

    def __init__(self, costs: ServingCosts) -> None:
        self.shapes = costs.shapes
        self.origin = f"measured on {costs.machine}"
        self._costs = costs
        self._known: dict[tuple[int, int], list[float]] = {}

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Seconds of a step without a draft, then with each of ``shapes``."""
        key = (step_context.batch, step_context.context // _CONTEXT_STEP)
        found = self._known.get(key)
        if found is None:
            context = (key[1] + 0.5) * _CONTEXT_STEP
            times = (
                self._costs.step_s(shape, batch=step_context.batch, context=context)
                for shape in (None, *self.shapes)
            )
            found = self._known[key] = [inf if t is None else t for t in times]
        return found

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:  # noqa: ARG002
        """What was measured of steps holds it."""
        return 0.0
