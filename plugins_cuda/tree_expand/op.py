"""TreeExpand: one level of a dynamic draft tree (EAGLE-2, arXiv 2406.16858, expansion phase)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights
from specbuild.plugins_cuda.tree_expand.body import body
from specbuild.plugins_cuda.tree_expand.lowering import lower

if TYPE_CHECKING:
    import torch


def stable_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest along the last axis, falling; ties go to the lower index."""
    import torch

    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[..., :k], ordered.indices[..., :k]


def reference(
    logits: torch.Tensor, score: torch.Tensor, d2t: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K = ``top_k`` best children of every frontier node, and the next frontier.

    ``logits`` [B·F, Vd], ``score`` [B, F] (the parents' cumulative log-probabilities; 0 for the
    root), ``d2t`` [Vd] offsets (target id = draft id + d2t[draft id]), ``top_k`` []. Returns
    tokens [B, F·K] (target ids), scores [B, F·K] = parent + min(0, logit − logsumexp), and
    frontier [B, K], the indices of the K best of those F·K. The minimum with 0 keeps a child of
    probability 1 from outranking its parent by rounding.
    """
    import torch

    batch = score.shape[0]
    k = int(top_k)
    best, draft_ids = stable_topk(logits.float(), k)
    log_p = (best - torch.logsumexp(logits.float(), dim=-1, keepdim=True)).clamp(max=0)
    scores = (score.reshape(-1, 1) + log_p).reshape(batch, -1)
    tokens = (draft_ids + d2t.long()[draft_ids]).reshape(batch, -1)
    frontier = stable_topk(scores, k)[1]
    return tokens.int(), scores, frontier.int()


OP = OpSpec(
    name="TreeExpand",
    doc="Draft logits of one level to the top-k children per node and the next frontier.",
    inputs=(
        TensorSpec("logits", "float32", ("BF", "draft_vocab")),
        TensorSpec("score", "float32", ("B", "F")),
        TensorSpec("d2t", "int32", ("draft_vocab",)),
        TensorSpec("top_k", "int32", ()),
    ),
    outputs=(
        TensorSpec("tokens", "int32", ("B", "FK")),
        TensorSpec("scores", "float32", ("B", "FK")),
        TensorSpec("frontier", "int32", ("B", "K")),
    ),
    attributes=(),
    reference=reference,
    body=body,
    lower=lower,
    traffic=Weights(looked_up=("d2t",)),
)
