"""HeadChoose: the target's token at each of ``logit_rows``, without writing the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.choose.op import reference as choose
from specbuild.plugins_cuda.head_choose.lowering import lower
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_head.lowering import tactics
from specbuild.plugins_cuda.rms_head.op import HEAD_ATTRIBUTES
from specbuild.plugins_cuda.rms_head.op import reference as rms_head
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    logit_rows: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    eps: float,
    rounding: str,
    divisor: float = 1.0,
    cap: float = 0.0,
    vocab_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``Choose`` of ``RmsHead`` with top_k 0 and top_p 1: choice [R], its logprob [R]."""
    import torch

    logits = rms_head(
        x,
        logit_rows,
        norm,
        weight,
        eps=eps,
        rounding=rounding,
        divisor=divisor,
        cap=cap,
        vocab_size=vocab_size,
    )
    top_k, top_p = torch.zeros_like(seed), torch.ones_like(temperature)
    return choose(logits, temperature, top_k, top_p, seed, position)


OP = OpSpec(
    name="HeadChoose",
    doc="RmsHead and Choose with neither top-k nor top-p: token and log-probability of each row.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("norm", "W", ("K",)),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("temperature", "float32", ("R",)),
        TensorSpec("seed", "int32", ("R",)),
        TensorSpec("position", "int32", ("R",)),
    ),
    outputs=(
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("logprob", "float32", ("R",)),
    ),
    attributes=HEAD_ATTRIBUTES,
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), part="head"),
)
