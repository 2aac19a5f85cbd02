"""TreeSelect: the best N candidates of a draft tree (EAGLE-2, arXiv 2406.16858, reranking)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights
from specbuild.plugins_cuda.tree_expand.op import stable_topk
from specbuild.plugins_cuda.tree_select.body import body
from specbuild.plugins_cuda.tree_select.lowering import lower

if TYPE_CHECKING:
    import torch


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bools [..., n] to int32 words [..., ceil(n / 32)]: bit j % 32 of word j // 32."""
    import torch

    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 32))
    groups = padded.reshape(*bits.shape[:-1], -1, 32)
    words = (groups.long() << torch.arange(32, device=bits.device)).sum(-1)
    return words.where(words < 2**31, words - 2**32).int()


def reference(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    depth: int,
) -> tuple[torch.Tensor, ...]:
    """Return the N = ``draft_tokens`` best candidates as a tree below a root at slot 0.

    ``tokens``, ``scores``, ``parents`` are [B, M]. A parent is an index in the pool, or -1 for the
    root. Parents precede children and have no lower score; no candidate is deeper than ``depth``.
    Candidates of score −inf are absent. The best ones are those of the highest score, then of the
    lowest index. They are stored in slots 1, 2, … in the order of indices.

    Returns tokens [B, N+1] (-1 at the root and at unused slots), parents [B, N+1] (slots; -1 at the
    root and at unused slots), depths [B, N+1] (0 at both), ancestor_bits [B, N+1, W] (ancestors and
    self) and count [B], the number of used slots including the root.
    """
    import torch

    del depth  # the closed form of the body needs a bound; this walk does not
    batch, nodes = tokens.shape[0], int(draft_tokens) + 1
    out_tokens = torch.full((batch, nodes), -1, dtype=torch.int32)
    out_parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    depths = torch.zeros(batch, nodes, dtype=torch.int32)
    bits = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    bits[:, torch.arange(nodes), torch.arange(nodes)] = True
    count = torch.ones(batch, dtype=torch.int32)
    for b in range(batch):
        best = stable_topk(scores[b], nodes - 1)[1]
        kept = sorted(i for i in best.tolist() if scores[b, i] > -torch.inf)
        slot_of = {-1: 0} | {candidate: slot for slot, candidate in enumerate(kept, start=1)}
        for candidate, slot in zip(kept, range(1, nodes), strict=False):
            parent = slot_of[int(parents[b, candidate])]
            out_tokens[b, slot] = tokens[b, candidate]
            out_parents[b, slot] = parent
            depths[b, slot] = depths[b, parent] + 1
            bits[b, slot] |= bits[b, parent]
        count[b] = len(kept) + 1
    return out_tokens, out_parents, depths, pack_bits(bits), count


OP = OpSpec(
    name="TreeSelect",
    doc="All candidates to the best N nodes in topological order, with ancestor bits.",
    inputs=(
        TensorSpec("tokens", "int32", ("B", "M")),
        TensorSpec("scores", "float32", ("B", "M")),
        TensorSpec("parents", "int32", ("B", "M")),
        TensorSpec("draft_tokens", "int32", ()),
    ),
    outputs=(
        TensorSpec("tree_tokens", "int32", ("B", "N1")),
        TensorSpec("tree_parents", "int32", ("B", "N1")),
        TensorSpec("depths", "int32", ("B", "N1")),
        TensorSpec("ancestor_bits", "int32", ("B", "N1", "W")),
        TensorSpec("count", "int32", ("B",)),
    ),
    attributes=(AttributeSpec("depth", int),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=Weights(),
)
