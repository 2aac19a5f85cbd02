"""Steps that verify chains which the host proposes (suffix decoding)."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.state import LONG_CHAIN
from specbuild.builder.backends.cuda.step.target import TargetRows
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine_dir.plan import OFFERED

# Chains that steps are made for beside the longest: a root and its chain fill a tile of rows.
_LENGTHS = (3, 7, 15, 31, 63, 127)
# Mean lengths of chains in ragged steps.
_MEAN_LENGTHS = (1, 7, 31, 127)


def offered_sizes(batch: int, longest: int, *, ragged: bool) -> tuple[tuple[int, int], ...]:
    """The longest chain and the rows of each step for ``batch`` sequences, by rows.

    The host proposes up to ``longest`` tokens. Without ``ragged``, and for one sequence, there are
    rows for whole chains of all sequences. Each sequence of a ragged step has a chain of its own
    length, and there are rows for the mean of these lengths.
    """
    is_ragged = ragged and batch > 1
    lengths = [n for n in _LENGTHS if n < longest] + [longest]
    lengths = [n for n in lengths if batch * (n + 1) <= MAX_DECODE_ROWS]
    if is_ragged and lengths:
        means = [n for n in _MEAN_LENGTHS if 3 < n < lengths[-1] or (n == 1 and lengths[-1] > 3)]
        lengths = [*means, lengths[-1]]
    sizes = []
    for n in lengths:
        most = min(longest, max(n, LONG_CHAIN), batch * n) if is_ragged else n
        sizes.append((most, batch * (n + 1)))
    return tuple(sizes)


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
