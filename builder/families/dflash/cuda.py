"""DFlash in CUDA engines: a context from the target's states, and a block of queries over it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbuild.builder.backends.cuda.kernel_limits import require_draft_layers
from specbuild.builder.backends.cuda.step.draft import CudaDraft, Drafting
from specbuild.builder.backends.cuda.step.draft_parts import DraftParts
from specbuild.builder.backends.cuda.step.draft_trees import (
    expand,
    rows_of_fixed_tree,
    tree_of_levels,
)
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.plugins_cuda.tree_select.op import pack_bits
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry


class BlockStep:
    """See :class:`DraftStep`: one pass over a block drafts all levels."""

    def tree(self, drafting: Drafting) -> dict[str, Tensor]:
        """See :class:`DraftStep`."""
        drafting.ingest()
        return tree_of_levels(drafting.parts, drafting.program, drafting.shape, _block(drafting))

    def write_rows(
        self,
        parts: EngineParts,
        draft: DraftParts,
        program: ProgramIr,
        states: Tensor,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """See :class:`DraftStep`. ``inputs``: positions [T] and the cache's write_slot [T]."""
        placement = parts.placement(
            draft.full_name("draft_fuse"),
            program,
            {**inputs, "captured": parts.draft_states(draft, program, states)},
            rows=states.shape[0],
            logit_rows=1,
        )
        placement.place(placement.graph.pools)


DFLASH_CUDA = CudaDraft(BlockStep(), require_draft_layers)


def _block(drafting: Drafting) -> dict[str, Tensor]:
    """Return the TreeExpand of all levels: one node per level, from the rows of each block."""
    parts, draft, program = drafting.parts, drafting.draft, drafting.program
    batch, shape, block = drafting.batch, drafting.shape, draft.geometry
    assert isinstance(block, DFlashGeometry)
    depth, max_batch = shape.draft_depth, parts.ports.sizes.batch
    count = block.block_rows(depth)
    table = parts.page_table(draft.group, batch)
    rows = _rows(parts, program, block, table, count)
    of_levels = torch.arange(block.first_row, block.first_row + depth)
    indices = torch.arange(max_batch)[:, None] * count + of_levels
    logit_rows = parts.fixed(f"block.{count}.logit_rows.{depth}", indices.flatten().int())
    inputs = draft.inputs({**rows, "logit_rows": logit_rows.rows(0, batch * depth)}, table)
    placement = parts.placement(
        draft.full_name("draft"), program, inputs, rows=batch * count, logit_rows=batch * depth
    )
    graph = placement.graph
    assert graph.head is not None and graph.head.inputs[0] is not None
    placement.place([*graph.pools, graph.head.inputs[0]])
    score = parts.fixed(f"block.score.{depth}", torch.zeros(max_batch, depth)).rows(0, batch)
    children = shape.draft_top_k
    frontier = {"logits": logits(placement), "score": score}
    return expand(parts, draft, program, frontier, children=children, level=None)


def _rows(
    parts: EngineParts, program: ProgramIr, draft: DFlashGeometry, table: Tensor, count: int
) -> dict[str, Tensor]:
    """Return the rows of blocks, root and mask tokens, as a tree with the block's visibility."""
    visible = torch.ones(count, count, dtype=torch.bool)
    tree = {
        "tree_tokens": torch.full((count,), draft.mask_token, dtype=torch.int32),
        "depths": torch.arange(count, dtype=torch.int32),
        "tree_bits": pack_bits(visible.tril() if draft.causal else visible),
    }
    return rows_of_fixed_tree(parts, program, f"block.{count}", tree, table)
