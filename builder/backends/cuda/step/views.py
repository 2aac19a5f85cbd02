"""Partial views in a step: its rows, what each layer sees, and their state (SpecPV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.state import PARTIAL_TABLES
from specbuild.builder.backends.cuda.step.target import TargetRows, TargetViews
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine_dir.cache_groups import FULL_GROUP, LATENT_GROUP
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, DraftShape
from specbuild.runtime.lossy.specpv.state import ViewGeometry

# The head takes rows by this many, and reads its weight once for all of them: the samples fill up
# the last ones, and as many more.
_HEAD_ROWS = 8
# A context that none is longer than.
_NEVER = 2**31 - 1
# Groups that keep every position. A sequence has the same pages in both (DeviceRows sees to that),
# so that a view's page table and a row's place in the cache are those of both.
_WHOLE_GROUPS = (FULL_GROUP, LATENT_GROUP, INDEXER_GROUP)


def refresh_capacities(views: ViewGeometry, batch: int, shape: DraftShape) -> tuple[int, ...]:
    """Rows for what full steps re-verify, beside the trees, rising; none where no buffer fits.

    Sequences take turns: mostly one re-verifies its buffer, which needs no more rows than that.
    Where several must at once there is capacity for as many buffers as fit.
    """
    buffer = views.config.n_spec_tokens_buf
    left = MAX_DECODE_ROWS - batch * (shape.draft_tokens + 1)
    most = min(left // buffer, batch)
    return tuple(sorted({buffer, most * buffer})) if most else ()


def general_capacity(
    views: ViewGeometry, batch: int, shape: DraftShape, widest: DraftShape, buffers: int
) -> int:
    """Rows for what is re-verified such that steps have as many rows as with the tree ``widest``.

    Steps with other trees of so many sequences then share kernels, which are made for their rows.
    There is capacity for so many ``buffers``, or as many as fit.
    """
    needed = batch * (widest.draft_tokens + 1) + buffers * views.config.n_spec_tokens_buf
    return min(MAX_DECODE_ROWS, needed) - batch * (shape.draft_tokens + 1)


def samples_of(rows: int, capacity: int) -> int:
    """At how many of the re-verified rows a refresh with ``rows`` tree rows chooses too."""
    return min(capacity, -rows % _HEAD_ROWS + _HEAD_ROWS)


def sample_rows(
    program: ProgramIr,
    rows: TargetRows,
    made: Mapping[str, Tensor],
    placed: Mapping[str, Tensor],
    capacity: int,
) -> tuple[TargetRows, dict[str, Tensor]]:
    """The rows with those at which the target samples once more, and ``ViewSamples``' outputs."""
    names = ("row_token_ids", "row_positions", "row_start", "logit_rows", "fed_again")
    how = ("row_temperature", "row_top_k", "row_top_p", "row_seed", "row_floor", "positions")
    tree_rows = made["token_ids"].shape[0]
    samples = samples_of(tree_rows, capacity)
    sampled = program.call(
        "ViewSamples",
        {**{name: placed[name] for name in names}, **{name: made[name] for name in how}},
        {"samples": samples},
        sizes={"N": tree_rows + samples},
    )
    inputs = {**rows.inputs, "logit_rows": sampled["chosen_rows"]}
    return replace(rows, inputs=inputs), sampled


def count_agreement(
    parts: EngineParts,
    program: ProgramIr,
    choice: Tensor,
    sampled: Mapping[str, Tensor],
    reverified: Tensor,
) -> None:
    """In front of Advance: the host learns how many re-verified tokens were sampled again."""
    names = ("sample_sequence", "sample_token")
    program.call(
        "ViewTally",
        {
            **parts.state("ViewTally", reverified.shape[0]),
            **{name: sampled[name] for name in names},
            "choice": choice,
            "fed_again": reverified,
        },
    )


def view_rows(
    parts: EngineParts, program: ProgramIr, made: Mapping[str, Tensor], batch: int, capacity: int
) -> tuple[TargetRows, dict[str, Tensor]]:
    """The rows of ``VerifyInputs`` with those that are re-verified; and ``ViewInputs``' outputs.

    Without capacity nothing is re-verified, and no view is chosen: most steps are spared the
    launches.
    """
    views = parts.views
    assert views is not None
    rows = made["token_ids"].shape[0]
    # The only one beside the full layers' (specpv_options.py).
    sliding = next((name for name in parts.target_groups if name not in _WHOLE_GROUPS), None)
    tables = {"page_table_full": parts.page_table(parts.viewed, batch)}
    if sliding:
        tables["page_table_sliding"] = parts.page_table(sliding, batch)
    names = ("token_ids", "positions", "ancestor_bits", "tree_count")
    given = {name: made[name] for name in names}
    given["write_slot_full"] = made[f"write_slot_{parts.viewed}"]
    if sliding:
        given["write_slot_sliding"] = made[f"write_slot_{sliding}"]
    placed = program.call(
        "ViewInputs",
        {**parts.state("ViewInputs", batch), **given, **tables},
        {
            "page_size": views.page_size,
            "block_size": views.config.block_size,
            "sink_tokens": views.sink_tokens,
            "window_blocks": views.config.n_window_blocks,
            "threshold": views.config.partial_threshold if capacity else _NEVER,
            "room": capacity,
        },
        sizes={"T": rows + capacity, "B1": batch + 1},
    )
    seen = program.call(
        "ViewTables",
        {
            "page_table": tables["page_table_full"],
            "partial_tables": parts.ports[PARTIAL_TABLES],
            "viewed": placed["viewed"],
        },
    )["view_tables"]
    inputs = {
        "token_ids": placed["row_token_ids"],
        "positions": placed["row_positions"],
        "row_start": placed["row_start"],
        "row_slot": placed["row_slot"],
        "tree_start": placed["tree_start"],
        "ancestor_bits": placed["row_bits"],
        "logit_rows": placed["logit_rows"],
    }
    asked = {
        "row_slot": placed["view_slot"],
        "tree_start": placed["view_start"],
        "logical_pages": tables["page_table_full"],
        "first_block": parts.ports.first("summarised", batch),
        "blocks": placed["blocks"],
        "budget": parts.ports.first("budget", batch),
        "tree_count": made["tree_count"],
    }
    slots = {
        group: placed["row_write_full" if group in _WHOLE_GROUPS else "row_write_sliding"]
        for group in parts.target_groups
    }
    target = TargetViews(seen, _view_positions(parts, program, seen, batch), asked, capacity > 0)
    return TargetRows(batch, rows + capacity, inputs, slots, target), placed


def _view_positions(
    parts: EngineParts, program: ProgramIr, seen: Tensor, batch: int
) -> Tensor | None:
    """Where the pages of views stand, which only keys that are rebuilt of latents must know."""
    layout = parts.layouts[parts.viewed]
    if not layout.group.latent_widths:
        return None
    return program.call(
        "ViewPositions",
        {"page_table": parts.page_table(parts.viewed, batch), "view_tables": seen},
        {"page_size": layout.tokens_per_page, "pages": layout.group.pages},
    )["page_position"]


def tree_features(program: ProgramIr, aux_hidden: Tensor, placed: Mapping[str, Tensor]) -> Tensor:
    """The aux hidden states of the trees' rows [R, C], in the order of VerifyInputs."""
    given = {"token_ids": placed["logit_rows"], "table": aux_hidden}
    return program.call("Embed", given, sizes={"H": aux_hidden.shape[1]})["x"]


def advance_views(  # noqa: PLR0917
    parts: EngineParts,
    program: ProgramIr,
    made: Mapping[str, Tensor],
    placed: Mapping[str, Tensor],
    path: Tensor | None,
    batch: int,
) -> None:
    """Behind Advance: the state of the views moves to the next step."""
    program.call(
        "ViewAdvance",
        {
            **parts.state("ViewAdvance", batch),
            "token_ids": made["token_ids"],
            "positions": made["positions"],
            "path": path,
            "fed_again": placed["fed_again"],
            "blocks": placed["blocks"],
        },
    )
