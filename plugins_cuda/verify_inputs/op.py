"""VerifyInputs: the trees of a batch become the rows of one pass of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.extend_inputs.op import pool_slot
from specbuild.plugins_cuda.level_inputs.op import live_sequences
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights
from specbuild.plugins_cuda.verify_inputs.lowering import lower

if TYPE_CHECKING:
    import torch


def _slots_within(depths: torch.Tensor, count: torch.Tensor, deepest: torch.Tensor) -> torch.Tensor:
    """Return how many of the first ``count`` [B] slots are within ``deepest`` [B]; at least 1.

    Slots are in order of depth.
    """
    import torch

    slot = torch.arange(depths.shape[1])
    used = (slot < count.unsqueeze(1)) & (depths <= deepest.unsqueeze(1))
    return used.sum(dim=1).clamp(min=1).int()


def _placed_rows(
    done: torch.Tensor, nodes: int, row_count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``row_start`` [B+1], and the slot of each row, without padding, among all B·N1."""
    import torch

    batch = done.shape[0]
    if row_count is None:
        row_start = (torch.arange(batch + 1) * nodes).clamp(max=nodes * live_sequences(done))
        return row_start, torch.arange(batch * nodes)
    counts = torch.where(done == 0, row_count, 0)
    has_row = torch.arange(nodes) < counts.unsqueeze(1)
    row_start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return row_start, has_row.flatten().nonzero().flatten()


def reference(
    tree_tokens: torch.Tensor | None,
    depths: torch.Tensor | None,
    tree_bits: torch.Tensor | None,
    count: torch.Tensor | None,
    length: torch.Tensor,
    root: torch.Tensor,
    done: torch.Tensor,
    limit: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    page_table_full: torch.Tensor | None,
    page_table_sliding: torch.Tensor | None,
    page_table_latent: torch.Tensor | None,
    page_table_latent_sliding: torch.Tensor | None,
    page_table_indexer: torch.Tensor | None,
    floor: torch.Tensor | None = None,
    row_count: torch.Tensor | None = None,
    *,
    page_size: int,
    rows: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Lay out slot i of sequence b as row ``row_start[b]`` + i; without a tree N1 = 1 (root only).

    Without ``row_count`` [B] all slots have rows: ``row_start[b]`` = b·N1, T = B·N1. With it, only
    the first ``row_count[b]`` slots of a sequence have rows, and a ``done`` sequence has none;
    ``row_start`` has their prefix sums. T is then the attribute ``rows``, at least their sum.
    Further rows are padding at position 0 with greedy sampling. Slots without rows are unused.

    ``tree_tokens``, ``depths`` [B, N1], ``tree_bits`` [B, N1, W] and ``count`` [B] are TreeSelect's
    outputs, but the token of slot 0 is ``root`` [B]. A row is at position ``length`` + depth and at
    view slot ``length`` + i. Slots whose token could not be emitted, because their depth exceeds
    limit − length − 2, are unused, and so are those from ``count`` on. All positions are therefore
    below ``limit``. ``page_table_full`` etc. [B, P] are those of the target's cache groups; absent
    groups have none.

    Returns token_ids [T], positions [T], row_start [B+1] (without ``row_count`` it rises up to the
    last sequence that is not ``done``), row_slot [T], tree_start [B] = length, ancestor_bits [T, W]
    (W = 1 without a tree), write_slot_full [T] etc. (unspecified without the table), logit_rows [T]
    = 0, 1, …, row_temperature, row_top_k, row_top_p, row_seed [T] (those of the sequence),
    tree_count [B] (the used slots, for TreeAccept), and row_floor [T] from ``floor`` [B], 0 without
    it. An unused slot has token 0, depth 0 and a write_slot in page 0. All slots of a ``done``
    sequence are unused, at length 0, with their own bit, and its tree_count is 1.
    """
    import torch

    batch = length.shape[0]
    live = done == 0
    start = torch.where(live, length, 0)
    nodes = 1 if tree_tokens is None else tree_tokens.shape[1]
    slot = torch.arange(nodes)
    own = torch.where(slot // 32 == torch.arange(-(-nodes // 32)).unsqueeze(1), 1 << slot % 32, 0).T
    own = torch.where(own >= 2**31, own - 2**32, own).int().expand(batch, -1, -1)
    if tree_tokens is None or depths is None or tree_bits is None or count is None:
        tree_tokens, depths, tree_bits = root.unsqueeze(1), torch.zeros(batch, 1).int(), own
        count = torch.ones(batch, dtype=torch.int32)
    row_start, of_rows = _placed_rows(done, nodes, row_count)
    count = count if row_count is None else torch.minimum(count, row_count)
    total = rows or len(of_rows)
    tree_count = _slots_within(depths, count, limit - length - 2).where(live, 1)
    used = (slot < tree_count.unsqueeze(1)) & live.unsqueeze(1)
    tokens = torch.where(slot == 0, root.unsqueeze(1), tree_tokens)
    row_slot = (start.unsqueeze(1) + slot).int()

    def laid_out(values: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """Return the values [B, N1, …] of slots with rows, then ``padding``."""
        used = values.flatten(0, 1)[of_rows]
        return torch.cat([used, used.new_full((total - len(used), *used.shape[1:]), padding)])

    def write_slots(table: torch.Tensor | None) -> torch.Tensor:
        slots = (torch.arange(total) % page_size).int()
        if table is not None:
            for row, place in enumerate(of_rows.tolist()):
                b, i = divmod(place, nodes)
                slots[row] = pool_slot(
                    table[b], int(row_slot[b, i]), page_size, row=row, live=bool(used[b, i])
                )
        return slots

    def per_row(values: torch.Tensor, padding: float = 0) -> torch.Tensor:
        return laid_out(values.unsqueeze(1).expand(-1, nodes), padding)

    bits = laid_out(torch.where(live[:, None, None], tree_bits, own))
    bits[len(of_rows) :, 0] = 1
    return (
        laid_out(torch.where(used, tokens, 0)).int(),
        laid_out(start.unsqueeze(1) + torch.where(used, depths, 0)).int(),
        row_start.int(),
        laid_out(row_slot),
        start.int(),
        bits,
        write_slots(page_table_full),
        write_slots(page_table_sliding),
        write_slots(page_table_latent),
        write_slots(page_table_latent_sliding),
        write_slots(page_table_indexer),
        torch.arange(total, dtype=torch.int32),
        per_row(temperature),
        per_row(top_k),
        per_row(top_p, 1),
        per_row(seed),
        tree_count,
        torch.zeros(total) if floor is None else per_row(floor),
    )


OP = OpSpec(
    name="VerifyInputs",
    doc="The trees and the state of a batch to the target's rows and their sampling parameters.",
    inputs=(
        TensorSpec("tree_tokens", "int32", ("B", "N1"), optional=True),
        TensorSpec("depths", "int32", ("B", "N1"), optional=True),
        TensorSpec("tree_bits", "int32", ("B", "N1", "W"), optional=True),
        TensorSpec("count", "int32", ("B",), optional=True),
        TensorSpec("length", "int32", ("B",)),
        TensorSpec("root", "int32", ("B",)),
        TensorSpec("done", "int32", ("B",)),
        TensorSpec("limit", "int32", ("B",)),
        TensorSpec("temperature", "float32", ("B",)),
        TensorSpec("top_k", "int32", ("B",)),
        TensorSpec("top_p", "float32", ("B",)),
        TensorSpec("seed", "int32", ("B",)),
        TensorSpec("page_table_full", "int32", ("B", "P_full"), optional=True),
        TensorSpec("page_table_sliding", "int32", ("B", "P_sliding"), optional=True),
        TensorSpec("page_table_latent", "int32", ("B", "P_latent"), optional=True),
        TensorSpec("page_table_latent_sliding", "int32", ("B", "P_latent_sliding"), optional=True),
        TensorSpec("page_table_indexer", "int32", ("B", "P_indexer"), optional=True),
        TensorSpec("floor", "float32", ("B",), optional=True),
        TensorSpec("row_count", "int32", ("B",), optional=True),
    ),
    outputs=(
        TensorSpec("token_ids", "int32", ("T",)),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "words")),
        TensorSpec("write_slot_full", "int32", ("T",), optional=True),
        TensorSpec("write_slot_sliding", "int32", ("T",), optional=True),
        TensorSpec("write_slot_latent", "int32", ("T",), optional=True),
        TensorSpec("write_slot_latent_sliding", "int32", ("T",), optional=True),
        TensorSpec("write_slot_indexer", "int32", ("T",), optional=True),
        TensorSpec("logit_rows", "int32", ("T",)),
        TensorSpec("row_temperature", "float32", ("T",)),
        TensorSpec("row_top_k", "int32", ("T",)),
        TensorSpec("row_top_p", "float32", ("T",)),
        TensorSpec("row_seed", "int32", ("T",)),
        TensorSpec("tree_count", "int32", ("B",)),
        TensorSpec("row_floor", "float32", ("T",)),
    ),
    attributes=(AttributeSpec("page_size", int), AttributeSpec("rows", int, 0)),
    reference=reference,
    lower=lower,
    traffic=Weights(),
)
