"""Partial views in a step (SpecPV): its rows, the views of each layer, and their state."""

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

# The head processes this many rows per pass over its weights. Samples fill the last group of rows
# and one more.
_HEAD_ROWS = 8
# A threshold above any context length.
_NEVER = 2**31 - 1
# Groups that keep every position. DeviceRows allocates the same pages in all of them, so that page
# tables of views and slots of rows are valid in each.
_FULL_GROUPS = (FULL_GROUP, LATENT_GROUP, INDEXER_GROUP)


def refresh_capacities(views: ViewGeometry, batch: int, shape: DraftShape) -> tuple[int, ...]:
    """Return the numbers of rows for re-verification, ascending; empty if no buffer fits.

    Usually one sequence re-verifies its buffer at a time, so the smallest has rows for one buffer.
    The largest has rows for as many buffers as fit.
    """
    buffer = views.config.n_spec_tokens_buf
    free_rows = MAX_DECODE_ROWS - batch * (shape.draft_tokens + 1)
    max_buffers = min(free_rows // buffer, batch)
    return tuple(sorted({buffer, max_buffers * buffer})) if max_buffers else ()


def general_capacity(
    views: ViewGeometry, batch: int, shape: DraftShape, widest: DraftShape, buffers: int
) -> int:
    """Return the re-verified rows that give a step as many rows as with the tree ``widest``.

    Steps with other trees for the same batch then share kernels, which are compiled for their rows.
    There is capacity for ``buffers`` buffers, or as many as fit.
    """
    needed = batch * (widest.draft_tokens + 1) + buffers * views.config.n_spec_tokens_buf
    return min(MAX_DECODE_ROWS, needed) - batch * (shape.draft_tokens + 1)


def num_samples(rows: int, capacity: int) -> int:
    """Return how many re-verified rows are also sampled in a step with ``rows`` tree rows."""
    return min(capacity, -rows % _HEAD_ROWS + _HEAD_ROWS)


def sample_rows(
    program: ProgramIr,
    rows: TargetRows,
    tree_inputs: Mapping[str, Tensor],
    view_inputs: Mapping[str, Tensor],
    capacity: int,
) -> tuple[TargetRows, dict[str, Tensor]]:
    """Return the rows with additional rows to sample, and ``ViewSamples``' outputs."""
    names = ("row_token_ids", "row_positions", "row_start", "logit_rows", "fed_again")
    parameters = ("row_temperature", "row_top_k", "row_top_p", "row_seed", "row_floor", "positions")
    tree_rows = tree_inputs["token_ids"].shape[0]
    samples = num_samples(tree_rows, capacity)
    sampled = program.call(
        "ViewSamples",
        {
            **{name: view_inputs[name] for name in names},
            **{name: tree_inputs[name] for name in parameters},
        },
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
    """Report how many re-verified tokens were sampled again. Must precede Advance."""
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
    parts: EngineParts,
    program: ProgramIr,
    tree_inputs: Mapping[str, Tensor],
    batch: int,
    capacity: int,
) -> tuple[TargetRows, dict[str, Tensor]]:
    """Return the rows of ``VerifyInputs`` with re-verified rows, and ``ViewInputs``' outputs.

    Without capacity no rows are re-verified and no view is selected, which saves launches in most
    steps.
    """
    views = parts.views
    assert views is not None
    rows = tree_inputs["token_ids"].shape[0]
    # There is at most one other group (specpv_options.py).
    sliding = next((name for name in parts.target_groups if name not in _FULL_GROUPS), None)
    tables = {"page_table_full": parts.page_table(parts.view_group, batch)}
    if sliding:
        tables["page_table_sliding"] = parts.page_table(sliding, batch)
    names = ("token_ids", "positions", "ancestor_bits", "tree_count")
    rows_of_trees = {name: tree_inputs[name] for name in names}
    rows_of_trees["write_slot_full"] = tree_inputs[f"write_slot_{parts.view_group}"]
    if sliding:
        rows_of_trees["write_slot_sliding"] = tree_inputs[f"write_slot_{sliding}"]
    view_inputs = program.call(
        "ViewInputs",
        {**parts.state("ViewInputs", batch), **rows_of_trees, **tables},
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
    view_tables = program.call(
        "ViewTables",
        {
            "page_table": tables["page_table_full"],
            "partial_tables": parts.ports[PARTIAL_TABLES],
            "viewed": view_inputs["viewed"],
        },
    )["view_tables"]
    inputs = {
        "token_ids": view_inputs["row_token_ids"],
        "positions": view_inputs["row_positions"],
        "row_start": view_inputs["row_start"],
        "row_slot": view_inputs["row_slot"],
        "tree_start": view_inputs["tree_start"],
        "ancestor_bits": view_inputs["row_bits"],
        "logit_rows": view_inputs["logit_rows"],
    }
    block_inputs = {
        "row_slot": view_inputs["view_slot"],
        "tree_start": view_inputs["view_start"],
        "logical_pages": tables["page_table_full"],
        "first_block": parts.ports.first("summarised", batch),
        "blocks": view_inputs["blocks"],
        "budget": parts.ports.first("budget", batch),
        "tree_count": tree_inputs["tree_count"],
    }
    slots = {
        group: view_inputs["row_write_full" if group in _FULL_GROUPS else "row_write_sliding"]
        for group in parts.target_groups
    }
    target = TargetViews(
        view_tables, _view_positions(parts, program, view_tables, batch), block_inputs, capacity > 0
    )
    return TargetRows(batch, rows + capacity, inputs, slots, target), view_inputs


def _view_positions(
    parts: EngineParts, program: ProgramIr, view_tables: Tensor, batch: int
) -> Tensor | None:
    """Return the positions of the views' pages, which only keys rebuilt from latents need."""
    layout = parts.layouts[parts.view_group]
    if not layout.group.latent_widths:
        return None
    return program.call(
        "ViewPositions",
        {"page_table": parts.page_table(parts.view_group, batch), "view_tables": view_tables},
        {"page_size": layout.tokens_per_page, "pages": layout.group.pages},
    )["page_position"]


def tree_features(
    program: ProgramIr, aux_hidden: Tensor, view_inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the aux hidden states of the trees' rows [R, C], in the order of VerifyInputs."""
    inputs = {"token_ids": view_inputs["logit_rows"], "table": aux_hidden}
    return program.call("Embed", inputs, sizes={"H": aux_hidden.shape[1]})["x"]


def advance_views(  # noqa: PLR0917
    parts: EngineParts,
    program: ProgramIr,
    tree_inputs: Mapping[str, Tensor],
    view_inputs: Mapping[str, Tensor],
    path: Tensor | None,
    batch: int,
) -> None:
    """Update the state of the views for the next step. Must follow Advance."""
    program.call(
        "ViewAdvance",
        {
            **parts.state("ViewAdvance", batch),
            "token_ids": tree_inputs["token_ids"],
            "positions": tree_inputs["positions"],
            "path": path,
            "fed_again": view_inputs["fed_again"],
            "blocks": view_inputs["blocks"],
        },
    )
