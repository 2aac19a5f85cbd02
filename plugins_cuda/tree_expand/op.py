"""TreeExpand: one level of a dynamic draft tree (EAGLE-2, arXiv 2406.16858, expansion phase)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.choose.op import gumbel_noise
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights
from specbuild.plugins_cuda.tree_expand.body import TEMPERATURE_RATIO, body
from specbuild.plugins_cuda.tree_expand.lowering import lower

if TYPE_CHECKING:
    import torch


def stable_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest along the last axis, falling; ties go to the lower index."""
    import torch

    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[..., :k], ordered.indices[..., :k]


def perturbed(
    logits: torch.Tensor,
    d2t: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Return ``logits`` [R, Vd] / (0.7 · temperature) + noise, unchanged in rows of temperature 0.

    ``temperature``, ``seed`` and ``position`` are [R]. The noise is Choose's, for target ids.
    """
    import torch

    if not bool((temperature > 0).any()):
        return logits
    ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
    noise = gumbel_noise(seed, position, int(ids.max()) + 1)[:, ids]
    sampled = (temperature > 0).unsqueeze(1)
    divisor = TEMPERATURE_RATIO * torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return torch.where(sampled, logits / divisor + noise, logits)


def reference(
    logits: torch.Tensor,
    score: torch.Tensor,
    d2t: torch.Tensor,
    top_k: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    form: torch.Tensor | None = None,
    *,
    offset: int = 0,
    per_node: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the K = ``top_k`` best children of every frontier node, and the next frontier.

    ``logits`` [B·F, Vd]; ``score`` [B, F], the cumulative log-probabilities of the parents (0 for
    the root); ``d2t`` [Vd] offsets (target id = draft id + d2t[draft id]); ``top_k`` []. Returns
    tokens [B, F·K] (target ids), scores [B, F·K] = parent + min(0, logit − logsumexp), and frontier
    [B, K], the indices of the K best of those F·K. The minimum with 0 ensures that rounding never
    ranks a child of probability 1 above its parent.

    With ``temperature`` fp32, ``seed`` and ``position`` int32 [B], the logits of a sequence of
    temperature T > 0 are first replaced by logit / (0.7 · T) + noise. The noise is that which
    Choose adds to the target's logits at the node's position: node f of sequence b is at
    ``position[b] + offset + per_node · f``.

    With ``form`` [F·K], the scores of a tree of fixed form: entries below 0 replace the children's
    scores, for all sequences alike. −inf marks a child that the tree lacks.
    """
    import torch

    batch, nodes = score.shape
    k = int(top_k)
    logits = logits.float()
    if temperature is not None and seed is not None and position is not None:
        steps = offset + per_node * torch.arange(nodes, device=position.device)
        logits = perturbed(
            logits,
            d2t,
            temperature.repeat_interleave(nodes),
            seed.repeat_interleave(nodes),
            (position.unsqueeze(1) + steps).flatten(),
        )
    best, draft_ids = stable_topk(logits, k)
    log_p = (best - torch.logsumexp(logits, dim=-1, keepdim=True)).clamp(max=0)
    scores = (score.reshape(-1, 1) + log_p).reshape(batch, -1)
    if form is not None:
        scores = torch.where(form < 0, form, scores)
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
        TensorSpec("temperature", "float32", ("B",), optional=True),
        TensorSpec("seed", "int32", ("B",), optional=True),
        TensorSpec("position", "int32", ("B",), optional=True),
        TensorSpec("form", "float32", ("FK",), optional=True),
    ),
    outputs=(
        TensorSpec("tokens", "int32", ("B", "FK")),
        TensorSpec("scores", "float32", ("B", "FK")),
        TensorSpec("frontier", "int32", ("B", "K")),
    ),
    attributes=(AttributeSpec("offset", int, 0), AttributeSpec("per_node", int, 0)),
    reference=reference,
    body=body,
    lower=lower,
    traffic=Weights(looked_up=("d2t",)),
)
