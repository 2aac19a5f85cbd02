"""WeighHeads: multiply an indexer's queries by the weights of their heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic
from specbuild.plugins_cuda.weigh_heads.lowering import lower

if TYPE_CHECKING:
    import torch

_QUERIES = ("T", "n_idx", "d_idx")


def reference(q: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """Return ``q`` [T, n_idx, d_idx] · ``head_weights`` [T, n_idx]; SpecPV selects by these."""
    return (q.float() * head_weights.float().unsqueeze(2)).to(q.dtype)


OP = OpSpec(
    name="WeighHeads",
    doc="Multiplies an indexer's queries by the weights of their heads.",
    inputs=(TensorSpec("q", "T", _QUERIES), TensorSpec("head_weights", "T", ("T", "n_idx"))),
    outputs=(TensorSpec("weighted", "T", _QUERIES),),
    attributes=(),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("reads activations, which stay in the L2 cache"),
)
