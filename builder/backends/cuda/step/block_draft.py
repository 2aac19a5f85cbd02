"""A DFlash draft in a step's program: context of the target's states, and a block of queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.draft_trees import expand
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.plugins_cuda.tree_select.op import pack_bits
from specbuild.runtime.engine_dir.geometry import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape

# Rows of a block stand where they stand, whatever a sequence may still emit.
_NO_LIMIT = 1 << 30


def block_rows(draft: DFlashGeometry, depth: int) -> int:
    """Rows of a block that drafts ``depth`` levels; one that is not causal is run whole."""
    return depth + 1 if draft.causal else draft.block_size


def keep_context(
    parts: EngineParts,
    draft: DraftParts,
    program: ProgramIr,
    states: Tensor,
    inputs: Mapping[str, Tensor],
) -> None:
    """Keys and values of the target's ``states`` [T, C] go into a draft's cache.

    ``inputs``: positions [T] and the cache's write_slot [T], by the names of the graph's.
    """
    placement = parts.placement(
        draft.own("draft_fuse"),
        program,
        {**inputs, "captured": parts.own_states(draft, program, states)},
        rows=states.shape[0],
        logit_rows=1,
    )
    placement.place(placement.graph.pools)


def draft_block(
    parts: EngineParts, draft: DraftParts, program: ProgramIr, batch: int, shape: DraftShape
) -> dict[str, Tensor]:
    """The TreeExpand of all levels: one node a level, of the first mask rows of each block."""
    block, depth = draft.block, shape.draft_depth
    assert block is not None
    count, every = block_rows(block, depth), parts.ports.sizes.batch
    table = parts.page_table(draft.group, batch)
    rows = _rows(parts, program, block, table, count)
    wanted = torch.arange(every)[:, None] * count + torch.arange(1, depth + 1)
    every_row = parts.fixed(f"block.{count}.logit_rows.{depth}", wanted.flatten().int())
    inputs = draft.inputs({**rows, "logit_rows": every_row.rows(0, batch * depth)}, table)
    placement = parts.placement(
        draft.own("draft"), program, inputs, rows=batch * count, logit_rows=batch * depth
    )
    graph = placement.graph
    assert graph.head is not None and graph.head.inputs[0] is not None
    placement.place([*graph.pools, graph.head.inputs[0]])
    score = parts.fixed(f"block.score.{depth}", torch.zeros(every, depth)).rows(0, batch)
    children = shape.draft_top_k
    return expand(parts, draft, program, logits(placement), score, children=children)


def _rows(
    parts: EngineParts, program: ProgramIr, draft: DFlashGeometry, table: Tensor, count: int
) -> dict[str, Tensor]:
    """The root and mask tokens of each sequence: the rows of a tree that sees what a block does."""
    batch, every = table.shape[0], parts.ports.sizes.batch
    seen = torch.ones(count, count, dtype=torch.bool)
    bits = pack_bits(seen.tril() if draft.causal else seen)
    tree = {
        "tree_tokens": torch.full((every, count), draft.mask_token, dtype=torch.int32),
        "depths": torch.arange(count, dtype=torch.int32).repeat(every, 1),
        "tree_bits": bits.repeat(every, 1, 1),
        "count": torch.full((every,), count, dtype=torch.int32),
    }
    limit = torch.full((every,), _NO_LIMIT, dtype=torch.int32)
    made = program.call(
        "VerifyInputs",
        {
            **{n: parts.fixed(f"block.{count}.{n}", t).rows(0, batch) for n, t in tree.items()},
            **parts.state("VerifyInputs", batch),
            "limit": parts.fixed("block.limit", limit).rows(0, batch),
            "page_table_full": table,
        },
        {"page_size": parts.page_size},
        sizes={"T": batch * count, "B1": batch + 1, "words": bits.shape[-1]},
    )
    return {**made, "write_slot": made["write_slot_full"]}
