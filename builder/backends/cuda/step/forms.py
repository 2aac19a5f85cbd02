"""Which step programs an engine has.

Without a lossy mode there is one for whatever a step may do. What lossy modes add would multiply
them: so an engine with one has exact programs for what most of its steps do, and for the rest
*general* ones, of few batches, in which values on the device say what each sequence does. These
take up what waits for the draft, re-verify one buffer, check, or check and re-verify many:

- a row's logits are kept where top-k, top-p or min-p cut it, so one program takes both kinds;
- rows of a sparse program whose budget is −1 attend to everything;
- what has capacity for re-verified rows runs without any, as padding rows;
- the draft may take up what waits for it in front of any step.

A row has the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.programs import (
    MAX_CHAIN,
    NO_DRAFT,
    StepForm,
    batch_buckets,
    deepest,
    fits,
)
from specbuild.builder.backends.cuda.step.target import KeptLogits
from specbuild.builder.backends.cuda.step.views import general_capacity, refresh_capacities
from specbuild.runtime.engine_dir.manifest import DraftShape

# Sequences from which on steps may be ragged, and rows from which on the target's time rises so
# steeply with them that it pays for chains of any length, not the longest alone.
_FEWEST_RAGGED, _MANY_ROWS = 4, 64
# How many times as many sequences a general program has as the next smaller one.
_GENERAL_STEP = 16


def step_forms(
    parts: EngineParts,
    shapes: Mapping[str, Sequence[DraftShape]],
    max_batch_size: int,
) -> list[StepForm]:
    """The steps for every batch bucket and draft shape that stays batch-invariant.

    ``shapes`` are those of each draft model, by what ``parts.drafts`` calls it.
    """
    found = []
    kinds = [(drafter, shape) for drafter, of_draft in shapes.items() for shape in of_draft]
    every = tuple(shape for _, shape in kinds)
    widest = max((NO_DRAFT, *every), key=lambda shape: shape.draft_tokens)
    for drafter, shape in (("", NO_DRAFT), *kinds):
        draft = parts.drafts[drafter].geometry if shape.draft_depth else None
        batches = [
            batch
            for batch in batch_buckets(max_batch_size)
            if fits(batch, shape, deepest(every), draft)
            # With SpecPV a step must be able to set one sequence's buffer right.
            and (parts.views is None or refresh_capacities(parts.views, batch, shape))
        ]
        # Also where no step with a draft fits: fewer sequences may be left, which draft again.
        drafted = bool(every) and shape == NO_DRAFT
        if not batches:
            continue
        if parts.views is None and parts.dsa is None:
            forms = _exact(batches, shape, ("none", "all"), drafted=drafted)
            longest = max((s.draft_tokens for s in shapes.get(drafter, ())), default=0)
            forms += _ragged(parts, batches, shape, longest)
        else:
            forms = _of_lossy_modes(parts, batches, shape, widest, drafted=drafted)
        found += [replace(form, drafter=drafter) for form in forms]
    return sorted(found, key=lambda form: form.batch)


def _exact(
    batches: Sequence[int], shape: DraftShape, logits: Sequence[KeptLogits], *, drafted: bool
) -> list[StepForm]:
    """Steps that attend to everything and re-verify nothing."""
    extending = (False, True) if drafted else (False,)
    return [
        StepForm(batch, shape, kept, extends)
        for batch, extends, kept in product(batches, extending, logits)
    ]


def _ragged(
    parts: EngineParts, batches: Sequence[int], shape: DraftShape, longest: int
) -> list[StepForm]:
    """Steps whose sequences verify different parts of their chains.

    A chain of D has D rows a sequence, or three quarters of all where it is long: some sequences
    verify the whole chain because others verify less. ``longest`` is that of the draft's trees.
    Recurrent states have capacity for equal numbers of rows alone.
    """
    depth = shape.draft_depth
    if shape.draft_top_k != 1 or depth < 2 or parts.states is not None:
        return []
    of_each = min(depth, -(-3 * (depth + 1) // 4)) if depth > MAX_CHAIN else depth
    return [
        StepForm(batch, shape, ragged_rows=of_each * batch)
        for batch in batches
        if batch >= _FEWEST_RAGGED
        if depth == longest or batch * (depth + 1) > _MANY_ROWS
    ]


def _of_lossy_modes(
    parts: EngineParts,
    batches: Sequence[int],
    shape: DraftShape,
    widest: DraftShape,
    *,
    drafted: bool,
) -> list[StepForm]:
    """Exact steps, with what indexers choose too where there are any, and the general ones."""
    # A screened head has no logits to keep: rows that want some take general steps.
    kept: KeptLogits = "none" if parts.prefilter_head else "cut"
    general_kept: KeptLogits = "all" if parts.prefilter_head else "cut"
    sparse, checks = parts.ports.sizes.sparse, parts.ports.sizes.checks
    # Where most steps are sparse, whole ones are of every other batch.
    found = _exact(batches[::-1][::2] if sparse else batches, shape, (kept,), drafted=drafted)
    if sparse:
        found += [StepForm(batch, shape, kept, sparse=True) for batch in batches]
    for batch in _general_batches(batches):
        plain = StepForm(batch, shape, general_kept, drafted, 0, sparse)
        if sparse and drafted:
            found.append(replace(plain, logits=kept))
        if checks:
            found.append(replace(plain, checks=True))
        if parts.views is not None:
            of_one, of_all = (
                general_capacity(parts.views, batch, shape, widest, buffers)
                for buffers in (1, batch)
            )
            found.append(replace(plain, capacity=of_one))
            # The passes of a check do for several buffers at once too, which is seldom.
            if checks or of_all > of_one:
                found.append(replace(plain, capacity=of_all, checks=checks))
        elif parts.prefilter_head:
            found.append(plain)
    return found


def _general_batches(batches: Sequence[int]) -> list[int]:
    """The largest batch and each ``_GENERAL_STEP``-th part of it, but none of one sequence."""
    found = [batches[-1]]
    while found[-1] > _GENERAL_STEP:
        found.append(found[-1] // _GENERAL_STEP)
    return found
