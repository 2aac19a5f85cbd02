"""Assistants in CUDA engines: levels whose rows attend to the target's caches and write to none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from specbuild.builder.backends.cuda.kernel_limits import require_heads, require_tiles
from specbuild.builder.backends.cuda.step.draft import CudaDraft, Drafting, fuse
from specbuild.builder.backends.cuda.step.draft_levels import LevelStep, add_level, candidates
from specbuild.builder.backends.cuda.step.draft_parts import DraftParts, placed_rows
from specbuild.builder.backends.cuda.step.draft_trees import rows_of_fixed_tree, select
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.plugins_cuda.cluster_logits.lowering import refused_sizes
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.engine_dir.feed_forward import DenseFeedForward
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


class CacheStep(LevelStep):
    """See :class:`DraftStep`: levels over the target's caches."""

    def tree(self, drafting: Drafting) -> dict[str, Tensor]:
        """See :class:`DraftStep`."""
        parts, program, shape = drafting.parts, drafting.program, drafting.shape
        pool, pending = candidates(drafting), drafting.pending_rows(0, drafting.batch)
        newest = program.call(
            "Embed", {"token_ids": pending["logit_rows"], "table": pending["captured_rows"]},
            sizes={"H": pending["captured_rows"].shape[1]},
        )  # fmt: skip
        states = fuse(parts, drafting.draft, program, newest["x"])
        rows = {**_rows(drafting, 1), "score": pending["score"]}
        parents = {"parent_rows": rows["logit_rows"]}
        hidden, expanded = drafting.run(rows, states, level=1, inputs=_views(drafting, rows))
        of_nodes = _rows(drafting, shape.draft_top_k) if shape.draft_depth > 1 else {}
        for level in range(1, shape.draft_depth):
            frontier = add_level(drafting, level, hidden, expanded, {**parents, **pool})
            parents = {"parent_bits": frontier["ancestor_bits"]}
            rows = {**of_nodes, **{n: frontier[n] for n in ("token_ids", "score")}}
            hidden, expanded = drafting.run(
                rows, frontier["hidden_rows"], level=level + 1, inputs=_views(drafting, rows)
            )
        add_level(drafting, shape.draft_depth, hidden, expanded, {**parents, **pool})
        return select(parts, program, shape, pool)

    def write_rows(
        self,
        parts: EngineParts,
        draft: DraftParts,
        program: ProgramIr,
        states: Tensor,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """See :class:`DraftStep`: the draft has no cache to write to."""


def _rows(drafting: Drafting, nodes: int) -> dict[str, Tensor]:
    """Return rows at the root's position, ``nodes`` of each sequence, that see no drafted token.

    VerifyInputs lays out a tree of roots without ancestor bits. The first row has the root's token.
    """
    tree = {
        "tree_tokens": torch.zeros(nodes, dtype=torch.int32),
        "depths": torch.zeros(nodes, dtype=torch.int32),
        "tree_bits": torch.zeros(nodes, -(-nodes // 32), dtype=torch.int32),
    }
    name = f"cache_level.{nodes}"
    return rows_of_fixed_tree(drafting.parts, drafting.program, name, tree, drafting.table)


def _views(drafting: Drafting, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that place rows in the caches of the target."""
    parts = drafting.parts
    tables = {group: parts.page_table(group, drafting.batch) for group in parts.target_groups}
    return placed_rows(rows, tables)


def _require(target: TargetGeometry, draft: AssistantGeometry) -> None:
    """See :class:`CudaDraft`."""
    decoder = draft.decoder
    if draft.clusters:
        refused = refused_sizes(draft.clusters, draft.read_clusters, decoder.hidden)
        if refused is not None:
            raise SpecbuildError(f"the draft's head has {refused}; build with --backend cpu")
    columns = {"hidden_size": decoder.hidden, "backbone_hidden_size": target.hidden}
    for feed_forward in decoder.feed_forwards:
        assert isinstance(feed_forward, DenseFeedForward)
        columns["intermediate_size"] = feed_forward.inner
    require_tiles("draft", rows={}, columns=columns)
    for layer in range(decoder.layers):
        heads = decoder.heads_of(layer)
        require_heads("draft", replace(decoder, kv_heads=heads.kv_heads, head_dim=heads.head_dim))


ASSISTANT_CUDA = CudaDraft(CacheStep(), _require)
