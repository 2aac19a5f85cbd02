"""HeadScreen: HeadChoose with an int8 prefilter, which reads half of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.head_choose.op import reference as head_choose
from specbuild.plugins_cuda.head_screen.lowering import lower, tactics
from specbuild.plugins_cuda.linear.op import PACKED_AXES
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_head.op import HEAD_ATTRIBUTES
from specbuild.plugins_cuda.traffic import TrafficRequest, product_terms, stored_terms
from specbuild.runtime.engine_dir.traffic import Traffic

if TYPE_CHECKING:
    import torch


def reference(
    x: torch.Tensor,
    logit_rows: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    codes: torch.Tensor,  # noqa: ARG001
    errors: torch.Tensor,  # noqa: ARG001
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
    """Return ``HeadChoose``'s choice [R]; its logprob is infinity, as it would need all logits.

    ``codes`` and ``errors`` [V] are ``screened(weight)`` and ``screen_errors(weight)``. They affect
    which tiles are read, but not the choice.
    """
    import torch

    choice, logprob = head_choose(
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
    return choice, torch.full_like(logprob, float("inf"))


def _traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: the complete int8 weight. A few tiles of the bf16 weight do not count."""
    return Traffic(
        read=stored_terms(request, besides=("weight",), part="head"),
        operations=product_terms(request, ("codes",), part="head"),
    )


OP = OpSpec(
    name="HeadScreen",
    doc="HeadChoose without log-probabilities: int8 logits within bounds, then bf16 where needed.",
    inputs=(
        TensorSpec("x", "T", ("T", "K")),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("norm", "W", ("K",)),
        TensorSpec("weight", "W", PACKED_AXES),
        TensorSpec("codes", "W", ("tiles", "code_units", "code_elements")),
        TensorSpec("errors", "float32", ("V",)),
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
    traffic=_traffic,
)
