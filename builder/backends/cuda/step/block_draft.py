"""A DFlash draft in a step's program: context of the target's states, and a block of queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specbuild.builder.backends.cuda.step.draft_trees import expand
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import logits
from specbuild.plugins_cuda.tree_select.op import pack_bits
from specbuild.runtime.engine_dir.cache_groups import DRAFT_GROUP
from specbuild.runtime.engine_dir.geometry import DFlashGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape

# Rows of a block stand where they stand, whatever a sequence may still emit.
_NO_LIMIT = 1 << 30


def block_rows(draft: DFlashGeometry, depth: int) -> int:
    """Rows of a block that drafts ``depth`` levels; one that is not causal is run whole."""
    return depth + 1 if draft.causal else draft.block_size


def keep_context(
    parts: EngineParts, program: ProgramIr, states: Tensor, rows: Mapping[str, Tensor]
) -> None:
    """Keys and values of the target's ``states`` [T, C] go into the draft's cache.

    ``rows``: positions [T] and the cache's write_slot [T], under the names of the graph's inputs.
    """
    placement = parts.placement(
        "draft_fuse",
        program,
        {**rows, "captured": states},
        rows=states.shape[0],
        logit_rows=1,
    )
    placement.place(placement.graph.pools)


def draft_block(
    parts: EngineParts, program: ProgramIr, batch: int, shape: DraftShape
) -> dict[str, Tensor]:
    """The TreeExpand of all levels: one node a level, of the first mask rows of each block."""
    draft, depth = parts.block, shape.draft_depth
    assert draft is not None
    count, every = block_rows(draft, depth), parts.ports.sizes.batch
    rows = _rows(parts, program, draft, batch, count)
    wanted = torch.arange(every)[:, None] * count + torch.arange(1, depth + 1)
    table = parts.page_table(DRAFT_GROUP, batch)
    ports = {
        **{name: rows[name] for name in ("token_ids", "positions", "row_start", "ancestor_bits")},
        **{f"{DRAFT_GROUP}.{name}": rows[name] for name in ("row_slot", "tree_start")},
        f"{DRAFT_GROUP}.write_slot": rows["write_slot_full"],
        f"{DRAFT_GROUP}.page_table": table.view(batch, 1, table.shape[1]),
        "logit_rows": parts.fixed(f"block.{count}.logit_rows.{depth}", wanted.flatten().int()).rows(
            0, batch * depth
        ),
    }
    placement = parts.placement(
        "draft", program, ports, rows=batch * count, logit_rows=batch * depth
    )
    graph = placement.graph
    assert graph.head is not None and graph.head.inputs[0] is not None
    placement.place([*graph.pools, graph.head.inputs[0]])
    score = parts.fixed(f"block.score.{depth}", torch.zeros(every, depth)).rows(0, batch)
    return expand(parts, program, logits(placement), score, shape.draft_top_k)


def _rows(
    parts: EngineParts, program: ProgramIr, draft: DFlashGeometry, batch: int, count: int
) -> dict[str, Tensor]:
    """The root and mask tokens of each sequence: the rows of a tree that sees what a block does."""
    every = parts.ports.sizes.batch
    seen = torch.ones(count, count, dtype=torch.bool)
    bits = pack_bits(seen.tril() if draft.causal else seen)
    tree = {
        "tree_tokens": torch.full((every, count), draft.mask_token, dtype=torch.int32),
        "depths": torch.arange(count, dtype=torch.int32).repeat(every, 1),
        "tree_bits": bits.repeat(every, 1, 1),
        "count": torch.full((every,), count, dtype=torch.int32),
    }
    limit = torch.full((every,), _NO_LIMIT, dtype=torch.int32)
    return program.call(
        "VerifyInputs",
        {
            **{n: parts.fixed(f"block.{count}.{n}", t).rows(0, batch) for n, t in tree.items()},
            **parts.state("VerifyInputs", batch),
            "limit": parts.fixed("block.limit", limit).rows(0, batch),
            "page_table_full": parts.page_table(DRAFT_GROUP, batch),
        },
        {"page_size": parts.page_size},
        sizes={"T": batch * count, "B1": batch + 1, "words": bits.shape[-1]},
    )
