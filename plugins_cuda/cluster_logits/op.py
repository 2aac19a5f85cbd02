"""ClusterLogits: logits of the tokens in the best clusters of a vocabulary (Gemma 4's assistants).

A head that multiplies the complete vocabulary and masks the other tokens has the same result. For
the 262144 tokens of width 256 of Gemma 4 E4B's assistant it reads 134 MB for each level of a draft,
30 µs on an H200. The best 32 of 2048 clusters have 2 MB.

The logits are those of the complete vocabulary, so that TreeExpand reads them like those of other
heads. On an H200 it took 5.8 µs for 201088 logits of one row, and 3.6 µs for 32000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.cluster_logits.lowering import UNREAD_STEP, lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import TrafficRequest, terms
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.engine_dir.traffic import Term, Traffic

if TYPE_CHECKING:
    import torch


def reference(
    scores: torch.Tensor,
    x: torch.Tensor,
    logit_rows: torch.Tensor,
    weight: torch.Tensor,
    cluster_of: torch.Tensor,
    *,
    read: int,
    unread: float,
) -> torch.Tensor:
    """Return logits fp32 [R, V] of ``x`` [T, K] at ``logit_rows`` [R]; ``weight`` is [V, K].

    ``cluster_of`` [V] are the clusters of tokens. Row r reads those in which ``scores`` [R, C] has
    its ``read`` largest values; ties go to the lower cluster. The sums are not rounded.

    The logit of another token v is ``unread`` − 64·v. TreeExpand is slow if thousands of the
    largest logits of 2048 tokens are equal, as in a part of the vocabulary that no cluster reads.
    """
    import torch

    nearest = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :read]
    is_read = torch.zeros_like(scores, dtype=torch.bool).scatter(1, nearest, value=True)
    logits = x[logit_rows.long()].float() @ weight.float().T
    others = unread - UNREAD_STEP * torch.arange(len(weight), device=logits.device)
    return logits.where(is_read[:, cluster_of.long()], others)


def traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: each row reads the weights of its clusters, and all cluster numbers."""
    weight, clusters = request.tensors["weight"], request.tensors["scores"].shape[1]
    vocab, width = weight.shape
    values = vocab // clusters * int(request.attributes["read"]) * width
    numbers = request.tensors["cluster_of"].nbytes
    return Traffic(
        read=terms(
            Term("head", values * ITEM_BYTES[weight.dtype], "logit_row"),
            Term("head", numbers, "pass"),
        ),
        operations=terms(Term("head", 2 * values, "logit_row")),
    )


OP = OpSpec(
    name="ClusterLogits",
    doc="fp32 logits of the tokens in each row's best clusters, very low ones for all others.",
    inputs=(
        TensorSpec("scores", "float32", ("R", "clusters")),
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("weight", "W", ("vocab", "K")),
        TensorSpec("cluster_of", "int32", ("vocab",)),
    ),
    outputs=(TensorSpec("logits", "float32", ("R", "vocab")),),
    attributes=(AttributeSpec("read", int), AttributeSpec("unread", float)),
    reference=reference,
    lower=lower,
    traffic=traffic,
)
