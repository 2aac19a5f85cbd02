"""Verification in a step: converts trees to rows of the target and computes accepted paths."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import SAMPLING, TargetRows
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import FIRST_ROWS, OFFERED, ROW_COUNTS, TARGET


def row_counts(parts: EngineParts, batch: int, *, host_proposal: bool) -> dict[str, Tensor]:
    """Return the state of a ragged step: the number of rows per sequence, set by the host."""
    return {"row_count": parts.ports[OFFERED if host_proposal else ROW_COUNTS].rows(0, batch)}


def row_sampling(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sampling parameters of the rows of VerifyInputs."""
    names = (*(f"row_{name}" for name in SAMPLING[:-1]), "positions")
    return {name: rows[n] for name, n in zip(SAMPLING, names, strict=True)}


def verify_rows(
    parts: EngineParts,
    program: ProgramIr,
    batch: int,
    tree: Mapping[str, Tensor] | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
    ragged_rows: int = 0,
) -> TargetRows:
    """Return the trees as rows of the target, or the roots only without a tree.

    ``state`` replaces ports. In a ragged step it has ``row_count`` [B]: the number of slots of each
    sequence with rows, of ``ragged_rows`` in all.
    """
    state = state or {}
    nodes = 1 if tree is None else tree["tree_tokens"].shape[1]
    trees = {}
    if tree is not None:
        trees = {name: tree[name] for name in ("tree_tokens", "depths", "count")}
        trees["tree_bits"] = tree["ancestor_bits"]
    tables = {
        f"page_table_{group}": parts.page_table(group, batch) for group in parts.target_groups
    }
    program.section = TARGET
    outputs = {}
    if ragged_rows and FIRST_ROWS in parts.ports.tensors:
        outputs["row_start"] = parts.ports.first(FIRST_ROWS, batch + 1)
    inputs = program.call(
        "VerifyInputs",
        {
            **trees,
            **parts.state("VerifyInputs", batch),
            **state,
            **tables,
        },
        {"page_size": parts.page_size, "rows": ragged_rows},
        outputs=outputs,
        sizes={"T": ragged_rows or batch * nodes, "B1": batch + 1, "words": -(-nodes // 32)},
    )
    slots = {group: inputs[f"write_slot_{group}"] for group in parts.target_groups}
    return TargetRows(
        batch, ragged_rows or batch * nodes, inputs, slots, row_count=state.get("row_count")
    )


def accept(
    program: ProgramIr,
    rows: TargetRows,
    tree: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    shape: DraftShape,
    *,
    path: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the accepted paths, which are also written to the start of ``path`` if given."""
    nodes = (rows.batch, shape.draft_depth + 1)
    is_ragged = rows.row_count is not None
    choices = (1, rows.rows) if is_ragged else (rows.batch, shape.draft_tokens + 1)
    return program.call(
        "TreeAccept",
        {
            "tokens": tree["tree_tokens"],
            "parents": tree["tree_parents"],
            "ancestor_bits": tree["ancestor_bits"],
            "count": rows.inputs["tree_count"],
            "choice": chosen["choice"].view(*choices),
            "row_start": rows.inputs["row_start"] if is_ragged else None,
        },
        {"depth": shape.draft_depth},
        outputs={} if path is None else {"path": path.view(*nodes)},
        sizes={"D1": shape.draft_depth + 1},
    )
