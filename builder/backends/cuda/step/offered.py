"""Steps that verify chains which the host proposes (suffix decoding)."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import TargetRows
from specbuild.runtime.engine_dir.plan import OFFERED

# Chains that steps are made for beside the longest: a root and its chain fill a tile of rows.
_LENGTHS = (3, 7, 15, 31, 63, 127)


def offered_lengths(longest: int) -> tuple[int, ...]:
    """The chains that steps verify, rising, where the host proposes up to ``longest`` tokens."""
    return (*(length for length in _LENGTHS if length < longest), longest)


def offered_chains(parts: EngineParts, batch: int, length: int) -> dict[str, Tensor]:
    """The host's chains as TreeSelect would give them: tree_tokens and so on."""
    port, nodes = parts.ports[OFFERED], length + 1
    chain = parts.chain(nodes)
    return {
        "count": port.rows(0, batch),
        "tree_tokens": port.rows(batch, batch * nodes).view(batch, nodes),
        **{name: tensor.rows(0, batch) for name, tensor in chain.items()},
    }


def keep_accepted(
    parts: EngineParts,
    program: ProgramIr,
    verified: TargetRows,
    tree: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    *,
    aux_hidden: Tensor,
) -> None:
    """Every draft's keys and values of the accepted tokens go into its cache.

    More of them may be accepted than can wait for a draft, which has taken up what waited before.
    Row t of the draft is the target's state at t with the token behind it: the row of slot i has
    the target's choice there, for the slots in front of the path's last. The last one waits.
    ``verified`` are the target's rows; the draft's stand in the same places.
    """
    batch, nodes = verified.batch, tree["tree_tokens"].shape[1]
    rows_given = 0 if verified.row_count is None else verified.rows
    for draft in parts.drafts.values():
        table = parts.page_table(draft.group, batch)
        # As many slots are in use as drafts were accepted; the rows of others go to page 0.
        rows = program.call(
            "VerifyInputs",
            {
                **{name: tree[name] for name in ("tree_tokens", "depths")},
                "tree_bits": tree["ancestor_bits"],
                "count": chosen["accepted"],
                **parts.state("VerifyInputs", batch),
                "page_table_full": table,
                "row_count": verified.row_count,
            },
            {"page_size": parts.page_size, "rows": rows_given},
            sizes={"T": verified.rows, "B1": batch + 1, "words": -(-nodes // 32)},
        )
        placed = {"token_ids": chosen["choice"], "write_slot": rows["write_slot_full"]}
        inputs = draft.inputs({**rows, **placed}, table)
        draft.step.keep_rows(parts, draft, program, aux_hidden, inputs)
