"""The costs of an engine's launches: prompts by tokens, and steps by batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, isfinite

from specbuild.runtime.decode.prompt_launches import prompt_launches
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import ShapeCosts, interpolated, measured_shapes
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

# Contexts within this number of tokens share one lookup.
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class ServingCosts:
    """Costs measured on ``machine``; a launch of prompts had at most ``chunk_rows`` rows.

    ``prompt_s[i]`` is the TTFT of one prompt of ``prompt_tokens[i]`` (ascending), alone. ``steps``
    are complete steps, including those without a draft.
    """

    machine: str
    chunk_rows: int
    prompt_tokens: tuple[int, ...]
    prompt_s: tuple[float, ...]
    steps: tuple[ShapeCosts, ...]

    def __post_init__(self) -> None:
        times = [*self.prompt_s, *(time_s for entry in self.steps for time_s in entry.step_s)]
        is_valid = (
            len(self.prompt_tokens) == len(self.prompt_s) > 0
            and all(a < b for a, b in pairwise(self.prompt_tokens))
            and min(self.chunk_rows, self.prompt_tokens[0]) > 0
            and all(isfinite(time_s) and time_s > 0 for time_s in times)
            and any(entry.shape is None for entry in self.steps)
            and all(len(e.contexts) == len(e.step_s) > 0 for e in self.steps)
        )
        if not is_valid:
            raise SpecbuildError(
                "the costs are malformed: they need prompts with rising tokens, steps without a "
                "draft, and times above 0"
            )

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """All measured drafts: see :func:`measured_shapes`."""
        return measured_shapes(self.steps)

    def prompts_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one launch; chunks are (tokens before them, rows).

        A launch takes as long as a prompt of as many rows. Each earlier token that a row attends to
        adds time, which prompts of several launches determine.
        """
        rows = sum(count for _, count in chunks)
        attended = sum(start * count for start, count in chunks)
        return self._launch_s(rows) + attended * self._attended_token_s

    def step_s(self, shape: DraftShape | None, *, batch: int, context: float) -> float | None:
        """Return the interpolated seconds of a complete step; None without a measurement.

        Beyond the largest measured batch the last slope continues.
        """
        by_batch = {entry.batch: entry for entry in self.steps if entry.shape == shape}
        if not by_batch:
            return None
        batches = sorted(by_batch)
        return interpolated(batches, [by_batch[b].step_at(context) for b in batches], batch)

    @cached_property
    def _single(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The prompts of one launch each, or the shortest prompt if there are none."""
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
    def _attended_token_s(self) -> float:
        """The seconds per attended token of a row, from the longest prompt of several launches."""
        tokens, time_s = self.prompt_tokens[-1], self.prompt_s[-1]
        counts = prompt_launches(tokens, self.chunk_rows)
        starts = accumulate(counts, initial=0)
        attended = sum(start * count for start, count in zip(starts, counts, strict=False))
        if not attended:
            return 0.0
        return max(0.0, time_s - sum(map(self._launch_s, counts))) / attended


class ServingDraftCosts:
    """The drafts of such a table, for the policy that selects among them."""

    def __init__(self, costs: ServingCosts) -> None:
        self.shapes = costs.shapes
        self.origin = f"measured on {costs.machine}"
        self._costs = costs
        self._by_context: dict[tuple[int, int], list[float]] = {}

    def step_s(self, step_context: StepContext) -> Sequence[float]:
        """Return the seconds of a step without a draft, then with each of ``shapes``."""
        key = (step_context.batch, step_context.context // _CONTEXT_STEP)
        times_s = self._by_context.get(key)
        if times_s is None:
            context = (key[1] + 0.5) * _CONTEXT_STEP
            times = (
                self._costs.step_s(shape, batch=step_context.batch, context=context)
                for shape in (None, *self.shapes)
            )
            times_s = self._by_context[key] = [inf if t is None else t for t in times]
        return times_s

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:  # noqa: ARG002
        """0, since the measured steps include it."""
        return 0.0
