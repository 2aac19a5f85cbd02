"""DsaTally: write the number of broken lists of a step to the host's ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.dsa_tally.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY

if TYPE_CHECKING:
    import torch


def reference(
    violations: torch.Tensor, step: torch.Tensor, ring_broken: torch.Tensor
) -> torch.Tensor:
    """Return ``ring_broken`` [S, BM] with the sums of ``violations`` [layers, B] at step % S.

    Entries past B are not written. The op runs before Advance, which makes the entry visible and
    increments ``step`` [1].
    """
    out = ring_broken.clone()
    out[int(step) % len(out), : violations.shape[1]] = violations.sum(0).int()
    return out


_RING = ("S", "BM")

OP = OpSpec(
    name="DsaTally",
    doc="Sums the broken lists of all layers into the ring's entry of this step.",
    inputs=(
        TensorSpec("violations", "int32", ("layers", "B")),
        TensorSpec("step", "int32", ("1",)),
        TensorSpec("ring_broken", "int32", _RING),
    ),
    outputs=(TensorSpec("ring_broken_out", "int32", _RING),),
    attributes=(),
    aliases=(("ring_broken_out", "ring_broken"),),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
