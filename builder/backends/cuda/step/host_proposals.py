"""Steps that verify host proposals: chains from suffix decoding."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.state import LONG_CHAIN
from specbuild.builder.backends.cuda.step.target import TargetRows
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine_dir.plan import OFFERED

# Lengths of chains with a step, besides the longest. A root and its chain fill a tile of rows.
_LENGTHS = (3, 7, 15, 31, 63, 127)
# Mean lengths of chains in ragged steps.
_MEAN_LENGTHS = (1, 7, 31, 127)


def host_proposal_sizes(
    batch: int, max_length: int, *, ragged: bool
) -> tuple[tuple[int, int], ...]:
    """Return the longest chain and the number of rows of each step for ``batch`` sequences.

    The host proposes up to ``longest`` tokens. A step without ``ragged`` or with one sequence has
    rows for the longest chain of all sequences. In a ragged step the chains have different lengths,
    and there are rows for their mean length.
    """
    is_ragged = ragged and batch > 1
    lengths = [n for n in _LENGTHS if n < max_length] + [max_length]
    lengths = [n for n in lengths if batch * (n + 1) <= MAX_DECODE_ROWS]
    if is_ragged and lengths:
        means = [n for n in _MEAN_LENGTHS if 3 < n < lengths[-1] or (n == 1 and lengths[-1] > 3)]
        lengths = [*means, lengths[-1]]
    sizes = []
    for n in lengths:
        max_chain = min(max_length, max(n, LONG_CHAIN), batch * n) if is_ragged else n
        sizes.append((max_chain, batch * (n + 1)))
    return tuple(sizes)


def forced_sizes(batch: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Return chain length and rows of the step for chains that guides force.

    It has rows for one token of every sequence, or for more tokens of some.
    """
    rows = max(2 * batch, longest + 1)
    return ((min(longest, rows - batch), rows),) if rows <= MAX_DECODE_ROWS else ()


def host_chains(parts: EngineParts, batch: int, length: int) -> dict[str, Tensor]:
    """Return the host's chains in the form of TreeSelect's outputs."""
    port, nodes = parts.ports[OFFERED], length + 1
    chain = parts.chain(nodes)
    return {
        "count": port.rows(0, batch),
        "tree_tokens": port.rows(batch, batch * nodes).view(batch, nodes),
        **{name: tensor.rows(0, batch) for name, tensor in chain.items()},
    }


def write_accepted(
    parts: EngineParts,
    program: ProgramIr,
    verified: TargetRows,
    tree: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    *,
    aux_hidden: Tensor,
) -> None:
    """Write the keys and values of accepted tokens to the caches of all drafts.

    More tokens can be accepted than fit into a draft's pending buffer, which it has just ingested.
    Row t of the draft combines the target's hidden state at t with the next token. The row of slot
    i therefore has the target's choice at i, for all slots before the last of the path. The last
    one stays pending. ``verified`` has the rows of the target, in the same order.
    """
    batch, nodes = verified.batch, tree["tree_tokens"].shape[1]
    num_rows = 0 if verified.row_count is None else verified.rows
    for draft in parts.drafts.values():
        table = parts.page_table(draft.group, batch)
        # The slots of accepted tokens are in use; other rows write to page 0.
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
            {"page_size": parts.page_size, "rows": num_rows},
            sizes={"T": verified.rows, "B1": batch + 1, "words": -(-nodes // 32)},
        )
        placed = {"token_ids": chosen["choice"], "write_slot": rows["write_slot_full"]}
        inputs = draft.inputs({**rows, **placed}, table)
        draft.step.write_rows(parts, draft, program, aux_hidden, inputs)
