"""Selects the step programs of an engine.

Without a lossy mode there is an exact program for every kind of step. Lossy modes would multiply
their number. An engine with a lossy mode therefore has exact programs for frequent steps only. The
others run in *general* programs for a few batch sizes, in which values on the device control each
sequence. General programs ingest pending rows, re-verify one buffer, check, or check and re-verify
several buffers:

- Logits of rows with top-k, top-p or min-p are written, so one program supports both kinds of rows.
- Rows of a sparse program with budget −1 attend to everything.
- A program with capacity for re-verified rows also runs without any, as padding.
- The draft can ingest pending rows before any step.

A row has the same bits in all of these programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.host_proposals import (
    forced_sizes,
    host_proposal_sizes,
)
from specbuild.builder.backends.cuda.step.logit_processor_steps import processor_batches
from specbuild.builder.backends.cuda.step.programs import (
    MAX_CHAIN,
    NO_DRAFT,
    StepForm,
    batch_buckets,
    deepest,
    fits,
)
from specbuild.builder.backends.cuda.step.target import WrittenLogits
from specbuild.builder.backends.cuda.step.views import general_capacity, refresh_capacities
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.runtime.engine_dir.manifest import DraftShape

# The minimum number of sequences of a ragged step. From _MANY_ROWS rows on, the target's time grows
# so steeply that ragged steps pay for chains of any length, not only for the longest.
_FEWEST_RAGGED, _MANY_ROWS = 4, 64
# The ratio between the batch sizes of consecutive general programs.
_GENERAL_STEP = 16


def step_forms(
    parts: EngineParts,
    shapes: Mapping[str, Sequence[DraftShape]],
    max_batch_size: int,
) -> list[StepForm]:
    """Return the steps for every batch bucket and draft shape that stays batch-invariant.

    ``shapes`` are those of each draft model, by its name in ``parts.drafts``.
    """
    all_forms = []
    drafts = [
        (drafter, shape) for drafter, shapes_of_draft in shapes.items() for shape in shapes_of_draft
    ]
    all_shapes = tuple(shape for _, shape in drafts)
    widest = max((NO_DRAFT, *all_shapes), key=lambda shape: shape.draft_tokens)
    for drafter, shape in (("", NO_DRAFT), *drafts):
        draft = parts.drafts[drafter].geometry if shape.draft_depth else None
        batches = [
            batch
            for batch in batch_buckets(max_batch_size)
            if fits(batch, shape, deepest(all_shapes), draft)
            # With SpecPV a step must have space to re-verify one sequence's buffer.
            and (parts.views is None or refresh_capacities(parts.views, batch, shape))
        ]
        # This also applies if no drafting step fits: with fewer sequences drafting resumes.
        can_extend = bool(all_shapes) and shape == NO_DRAFT
        if not batches:
            continue
        if parts.views is None and parts.dsa is None:
            forms = _exact(batches, shape, ("none", "all"), can_extend=can_extend)
            max_length = max((s.draft_tokens for s in shapes.get(drafter, ())), default=0)
            forms += _ragged(batches, shape, max_length)
        else:
            forms = _of_lossy_modes(parts, batches, shape, widest, can_extend=can_extend)
        all_forms += [replace(form, drafter=drafter) for form in forms]
    return sorted(all_forms, key=lambda form: form.batch)


def host_chain_forms(parts: EngineParts, engine_sizes: EngineSizes) -> list[StepForm]:
    """The steps that verify the host's chains.

    Without a drafter on the host these are tokens that guides force, for few batches, with logits.
    """
    longest, most = engine_sizes.host_chain, engine_sizes.limits.max_batch_size
    if not longest:
        return []
    # Views and lists have capacity for equal numbers of rows alone.
    ragged = parts.views is None and parts.dsa is None
    kinds: tuple[WrittenLogits, ...] = ("none", "all")
    sizes = {b: host_proposal_sizes(b, longest, ragged=ragged) for b in batch_buckets(most)}
    if engine_sizes.host_drafter is None:
        kinds = ("all",)
        sizes = {batch: forced_sizes(batch, longest) for batch in processor_batches(most)}
    return [
        StepForm(
            batch,
            DraftShape(1, longest_of, longest_of),
            kept,
            host_proposal=True,
            ragged_rows=rows if ragged and batch > 1 else 0,
        )
        for batch, of_batch in sizes.items()
        for longest_of, rows in of_batch
        for kept in kinds
    ]


def _exact(
    batches: Sequence[int], shape: DraftShape, logits: Sequence[WrittenLogits], *, can_extend: bool
) -> list[StepForm]:
    """Return steps that attend to everything and re-verify nothing."""
    extending = (False, True) if can_extend else (False,)
    return [
        StepForm(batch, shape, written, extends)
        for batch, extends, written in product(batches, extending, logits)
    ]


def _ragged(batches: Sequence[int], shape: DraftShape, max_length: int) -> list[StepForm]:
    """Return steps whose sequences verify prefixes of different lengths of their chains.

    A step for chains of D has D rows per sequence, or for long chains three quarters of D + 1.
    Some sequences verify the full chain because others verify less. ``max_length`` is the length of
    the draft's longest chain, the only one that also has steps with logits.
    """
    depth = shape.draft_depth
    if shape.draft_top_k != 1 or depth < 2:
        return []
    rows_per_sequence = min(depth, -(-3 * (depth + 1) // 4)) if depth > MAX_CHAIN else depth
    kinds: tuple[WrittenLogits, ...] = ("none", "all") if depth == max_length else ("none",)
    return [
        StepForm(batch, shape, written, ragged_rows=rows_per_sequence * batch)
        for batch, written in product(batches, kinds)
        if batch >= _FEWEST_RAGGED
        if depth == max_length or batch * (depth + 1) > _MANY_ROWS
    ]


def _of_lossy_modes(
    parts: EngineParts,
    batches: Sequence[int],
    shape: DraftShape,
    widest: DraftShape,
    *,
    can_extend: bool,
) -> list[StepForm]:
    """Return exact steps, also with selection by indexers if there are any, and general steps."""
    # A prefiltered head writes no logits, so rows that need logits use general steps.
    written: WrittenLogits = "none" if parts.prefilter_head else "cut"
    general_written: WrittenLogits = "all" if parts.prefilter_head else "cut"
    sparse, checks = parts.ports.sizes.sparse, parts.ports.sizes.checks
    # If most steps are sparse, full-attention steps exist for every second batch size only.
    forms = _exact(
        batches[::-1][::2] if sparse else batches, shape, (written,), can_extend=can_extend
    )
    if sparse:
        forms += [StepForm(batch, shape, written, sparse=True) for batch in batches]
    for batch in _general_batches(batches):
        general = StepForm(batch, shape, general_written, can_extend, 0, sparse)
        if sparse and can_extend:
            forms.append(replace(general, logits=written))
        if checks:
            forms.append(replace(general, checks=True))
        if parts.views is not None:
            one_buffer, all_buffers = (
                general_capacity(parts.views, batch, shape, widest, buffers)
                for buffers in (1, batch)
            )
            forms.append(replace(general, capacity=one_buffer))
            # A step that checks also serves several buffers at once, which is rare.
            if checks or all_buffers > one_buffer:
                forms.append(replace(general, capacity=all_buffers, checks=checks))
        elif parts.prefilter_head:
            forms.append(general)
    return forms


def _general_batches(batches: Sequence[int]) -> list[int]:
    """Return the largest batch, divided repeatedly by ``_GENERAL_STEP``, without batch 1."""
    general = [batches[-1]]
    while general[-1] > _GENERAL_STEP:
        general.append(general[-1] // _GENERAL_STEP)
    return general
