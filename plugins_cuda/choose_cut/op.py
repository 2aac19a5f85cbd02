"""ChooseCut: Choose for rows with top-k, top-p or min-p; the other rows already have a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.choose.op import reference as choose
from specbuild.plugins_cuda.choose_cut.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch


def cut_rows(
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows that sample from a subset of the tokens: bool [R]."""
    cut = (top_k > 0) | (top_p < 1)
    if floor is not None:
        cut |= floor < 0
    return cut & (temperature > 0)


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    floor: torch.Tensor | None,
    uncut_choice: torch.Tensor,
    uncut_logprob: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``Choose`` to the restricted rows, and read only their logits.

    The choice [R] and log-probability [R] of other rows are ``uncut_choice`` and ``uncut_logprob``.
    """
    choice, logprob = uncut_choice.clone(), uncut_logprob.clone()
    rows = cut_rows(temperature, top_k, top_p, floor)
    if not rows.any():
        return choice, logprob
    choice[rows], logprob[rows] = choose(
        logits[rows],
        temperature[rows],
        top_k[rows],
        top_p[rows],
        seed[rows],
        position[rows],
        None if floor is None else floor[rows],
    )
    return choice, logprob


OP = OpSpec(
    name="ChooseCut",
    doc="Choose at the rows that top-k, top-p or min-p cut; other rows keep what they have.",
    inputs=(
        TensorSpec("logits", "float32", ("R", "vocab")),
        TensorSpec("temperature", "float32", ("R",)),
        TensorSpec("top_k", "int32", ("R",)),
        TensorSpec("top_p", "float32", ("R",)),
        TensorSpec("seed", "int32", ("R",)),
        TensorSpec("position", "int32", ("R",)),
        TensorSpec("floor", "float32", ("R",), optional=True),
        TensorSpec("uncut_choice", "int32", ("R",)),
        TensorSpec("uncut_logprob", "float32", ("R",)),
    ),
    outputs=(
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("logprob", "float32", ("R",)),
    ),
    attributes=(),
    aliases=(("choice", "uncut_choice"), ("logprob", "uncut_logprob")),
    reference=reference,
    lower=lower,
    traffic=NoTraffic("logits were written by the launch in front and stay in the L2 cache"),
)
