"""HeadKeep: HeadChoose that keeps the logits of rows with top-k, top-p or min-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.choose_cut.op import cut_rows
from specbuild.plugins_cuda.head_choose.op import reference as head_choose
from specbuild.plugins_cuda.head_keep.lowering import lower
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
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor | None,
    kept: torch.Tensor,
    *,
    eps: float,
    rounding: str,
    divisor: float = 1.0,
    cap: float = 0.0,
    vocab_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``HeadChoose``'s choice [R] and logprob [R], and ``kept`` fp32 [R, V].

    ``kept`` receives the logits of the rows that ``top_k``, ``top_p`` or ``floor`` [R] restrict,
    for ``ChooseCut``.
    """
    import torch

    chosen = head_choose(
        x,
        logit_rows,
        norm,
        weight,
        temperature,
        seed,
        position,
        eps=eps,
        rounding=rounding,
        divisor=divisor,
        cap=cap,
        vocab_size=vocab_size,
    )
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
    cut = cut_rows(temperature, top_k, top_p, floor)
    return (*chosen, torch.where(cut.unsqueeze(1), logits, kept))


OP = OpSpec(
    name="HeadKeep",
    doc="HeadChoose, and the logits of the rows that top-k, top-p or min-p cut.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("norm", "W", ("K",)),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("temperature", "float32", ("R",)),
        TensorSpec("seed", "int32", ("R",)),
        TensorSpec("position", "int32", ("R",)),
        TensorSpec("top_k", "int32", ("R",)),
        TensorSpec("top_p", "float32", ("R",)),
        TensorSpec("floor", "float32", ("R",), optional=True),
        TensorSpec("kept", "float32", ("R", "vocab")),
    ),
    outputs=(
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("logprob", "float32", ("R",)),
        TensorSpec("logits", "float32", ("R", "vocab")),
    ),
    attributes=HEAD_ATTRIBUTES,
    aliases=(("logits", "kept"),),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=Weights(multiplied=("weight",), part="head"),
)
