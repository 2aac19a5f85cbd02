"""``step_costs.json``: the times of an engine's steps on one GPU model."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path

from specbuild.runtime.draft.draft_models import (
    RaggedShape,
    model_of,
    rows_per_sequence_of,
    shape_of,
    sorted_by_model,
)
from specbuild.runtime.engine_dir.features import of_feature, stored_keys
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import PLAN_FILE
from specbuild.runtime.engine_dir.strict_json import KEY, from_json, parsed, to_json
from specbuild.runtime.errors import EngineFileError, SpecbuildError

STEP_COSTS_FILE = "step_costs.json"
# The method of measurement. A table measured by another method is not used.
METHOD = "median of graph replays; draft: the launches in front of the target alone"
_PROGRAM_FOLDERS = ("programs/", "kernels/")
# A table with a longer step is malformed.
_MAX_STEP_S = 60.0
# Prior seconds of a step without a draft.
PLAIN_S = 2e-3
# Prior time that a draft adds, and that each of its levels adds, as shares of a step without one.
DRAFT_SHARE = 0.2
LEVEL_SHARE = 0.2


@dataclass(frozen=True)
class ShapeCosts:
    """Times of steps of ``batch`` sequences with one draft shape, by the length of the sequences.

    The shape (0, 0, 0) is a step without a draft. ``host_proposal``: the draft is a host proposal;
    otherwise the device drafts it. ``step_s[i]`` is the time of a full step with sequences of
    ``contexts[i]`` tokens; the contexts ascend. ``draft_s[i]`` is the part of this time before the
    target starts, 0 without a draft. The target runs ``draft_tokens`` + 1 tokens of every sequence,
    or, in a ragged step, ``rows_per_sequence`` tokens on average.
    ``drafter`` is the kind of the draft model if the engine has several.
    """

    batch: int
    draft_top_k: int
    draft_depth: int
    draft_tokens: int
    contexts: tuple[int, ...]
    step_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    host_proposal: bool = field(default=False, metadata={KEY: "offered"})
    drafter: str = field(default="", metadata=of_feature("draft_models"))
    rows_per_sequence: int = field(default=0, metadata=of_feature("ragged_steps"))

    @property
    def shape(self) -> DraftShape | None:
        """The draft shape; None without a draft."""
        shape = DraftShape(self.draft_top_k, self.draft_depth, self.draft_tokens)
        return shape_of(self.drafter, shape, self.rows_per_sequence) if self.draft_depth else None

    def step_at(self, context: float) -> float:
        """Return the interpolated seconds of a full step."""
        return interpolated(self.contexts, self.step_s, context)

    def draft_at(self, context: float) -> float:
        """Return the interpolated seconds of the draft's part of a step."""
        return interpolated(self.contexts, self.draft_s, context)


@dataclass(frozen=True)
class StepCosts:
    """The table of step costs, and the GPU, programs (a digest) and method of its measurement."""

    gpu: str
    programs: str
    method: str
    steps: tuple[ShapeCosts, ...]

    def shapes(self) -> tuple[DraftShape, ...]:
        """Return the measured shapes in order: see :func:`measured_shapes`."""
        return measured_shapes(self.steps)

    def ragged_shapes(self) -> tuple[RaggedShape, ...]:
        """Return the measured shapes of ragged steps, short chains first."""
        shapes = (costs.shape for costs in self.steps)
        ragged = {shape for shape in shapes if isinstance(shape, RaggedShape)}
        return tuple(sorted(ragged, key=lambda s: (s.drafter, s.draft_depth, s.rows_per_sequence)))

    def batches(self, shape: DraftShape | None) -> list[int]:
        """Return the batch sizes measured with this draft, ascending."""
        return sorted(c.batch for c in self.steps if c.shape == shape and not c.host_proposal)

    def step_s(
        self, shape: DraftShape | None, *, batch: int, context: float, host_proposal: bool = False
    ) -> float | None:
        """Return the interpolated seconds of a full step; None beyond the largest batch."""
        by_batch = {
            costs.batch: costs
            for costs in self.steps
            if costs.shape == shape and costs.host_proposal == host_proposal
        }
        if not by_batch or batch > max(by_batch):
            return None
        batches = sorted(by_batch)
        times = [by_batch[b].step_at(context) for b in batches]
        return interpolated(batches, times, batch)

    def target_s(self, tokens: int, *, batch: int, context: float) -> float | None:
        """Return the seconds in which the target runs ``tokens`` tokens of ``batch`` sequences.

        The value is interpolated between measured steps; None if this batch was not measured.
        """
        of_batch = [c for c in self.steps if c.batch == batch and not c.rows_per_sequence]
        parts = {c.draft_tokens + 1: c.step_at(context) - c.draft_at(context) for c in of_batch}
        if not parts:
            return None
        measured = sorted(parts)
        return interpolated(measured, [parts[n] for n in measured], tokens)


def prior_costs(shapes: Sequence[DraftShape], *, batch: int) -> StepCosts:
    """Return a table of prior costs for no draft and each of ``shapes``.

    It covers up to ``batch`` sequences. The time of a draft depends on its depth only. In a ragged
    step, half of a level's time is that of the target's row, of which there are fewer.
    """
    steps = [ShapeCosts(batch, 0, 0, 0, (0,), (PLAIN_S,), (0.0,))]
    for s in shapes:
        rows = rows_per_sequence_of(s)
        levels = (s.draft_depth + rows - 1) / 2 if rows else s.draft_depth
        step_s = (1 + DRAFT_SHARE + LEVEL_SHARE * levels) * PLAIN_S
        sizes = (s.draft_top_k, s.draft_depth, s.draft_tokens)
        steps.append(
            ShapeCosts(
                batch, *sizes, (0,), (step_s,), (0.0,),
                drafter=model_of(s), rows_per_sequence=rows,
            )
        )  # fmt: skip
    return StepCosts(gpu="", programs="", method=METHOD, steps=tuple(steps))


def measured_shapes(steps: Iterable[ShapeCosts]) -> tuple[DraftShape, ...]:
    """Return the distinct shapes of the draft models: by model, chains by depth, then trees.

    Shapes of ragged steps are not among them.
    """
    drafts = [c.shape for c in steps if not (c.host_proposal or c.rows_per_sequence)]
    return tuple(
        sorted_by_model(
            (shape for shape in drafts if shape is not None),
            lambda s: (s.draft_top_k > 1, s.draft_depth, s.draft_tokens),
        )
    )


def interpolated(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Return the value at ``place``, interpolated linearly between ``places``.

    Before the first place the value is constant; after the last one the last slope continues. A
    negative last slope counts as 0, since more work never makes a step cheaper.
    """
    if place <= places[0] or len(places) == 1:
        return values[0]
    right = min(bisect_left(places, place), len(places) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (places[right] - places[left])
    if place > places[-1]:
        return values[-1] + max(slope, 0.0) * (place - places[-1])
    return values[left] + slope * (place - places[left])


def programs_digest(manifest: Manifest) -> str:
    """Return a digest of the plan, its programs and its kernels."""
    parts = sorted(
        f"{name} {stored.xxh3_128}"
        for name, stored in manifest.files.items()
        if name == PLAN_FILE or name.startswith(_PROGRAM_FOLDERS)
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def to_bytes(costs: StepCosts) -> bytes:
    """Return the file's bytes, with times rounded to 0.1 µs."""
    steps = [
        {
            **stored_keys(c),
            "step_s": [round(t, 7) for t in c.step_s],
            "draft_s": [round(t, 7) for t in c.draft_s],
        }
        for c in costs.steps
    ]
    return (json.dumps({**to_json(costs), "steps": steps}, indent=1) + "\n").encode()


def from_bytes(data: bytes) -> StepCosts:
    """Return the table in a file. Raises EngineFileError if it is malformed."""
    try:
        costs = from_json(StepCosts, parsed(data), STEP_COSTS_FILE)
    except (SpecbuildError, ValueError) as error:
        raise EngineFileError(f"{error}; measure again with specbuild tune") from error
    keys = [(c.batch, c.shape, c.host_proposal) for c in costs.steps]
    if len(set(keys)) != len(keys):
        raise EngineFileError(
            f"{STEP_COSTS_FILE} has two entries for a batch and draft; measure again with "
            "specbuild tune"
        )
    for i, entry in enumerate(costs.steps):
        if not _is_sound(entry):
            raise EngineFileError(
                f"{STEP_COSTS_FILE}: steps[{i}] is malformed; measure again with specbuild tune"
            )
    return costs


def stored_step_costs(directory: Path, manifest: Manifest) -> bytes | None:
    """Return the verified bytes of an engine's table, or None. Raises EngineFileError."""
    if STEP_COSTS_FILE not in manifest.files:
        return None
    return bytes(read_file(directory, manifest, STEP_COSTS_FILE))


def read_step_costs(directory: Path, manifest: Manifest) -> StepCosts | None:
    """Return the table of an engine, or None. Raises EngineFileError."""
    stored = stored_step_costs(directory, manifest)
    return None if stored is None else from_bytes(stored)


def usable_step_costs(
    stored: bytes | None, manifest: Manifest, gpu: str
) -> tuple[StepCosts | None, str]:
    """Return the table if it applies to this engine and GPU, else None and the reason.

    An unreadable table raises no error: the engine runs without it and can measure a new one.
    """
    if stored is None:
        return None, "no step costs were measured"
    try:
        costs = from_bytes(stored)
    except EngineFileError as error:
        return None, str(error)
    reason = unusable_reason(costs, manifest, gpu)
    return (costs, "") if reason is None else (None, reason)


def unusable_reason(costs: StepCosts, manifest: Manifest, gpu: str) -> str | None:
    """Return why the table does not apply to this engine and GPU; None if it does."""
    if costs.gpu != gpu:
        return f"step costs were measured on {costs.gpu}, this is {gpu}"
    if costs.method != METHOD:
        return "step costs were measured by another version"
    if costs.programs != programs_digest(manifest):
        return "step costs were measured before the engine's programs changed"
    if not costs.batches(None):
        return "no step without a draft was measured"
    return None


def _is_sound(entry: ShapeCosts) -> bool:
    contexts, times = entry.contexts, (*entry.step_s, *entry.draft_s)
    sizes = (entry.draft_top_k, entry.draft_depth, entry.draft_tokens)
    return (
        entry.batch >= 1
        and (sizes == (0, 0, 0) or min(sizes) >= 1)
        and len(contexts) == len(entry.step_s) == len(entry.draft_s) > 0
        and contexts[0] >= 0
        and all(a < b for a, b in pairwise(contexts))
        and all(isfinite(t) and 0 <= t < _MAX_STEP_S for t in times)
        and min(entry.step_s) > 0
        and all(d <= s for d, s in zip(entry.draft_s, entry.step_s, strict=True))
    )
