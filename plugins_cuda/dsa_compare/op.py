"""DsaCompare: what a sparse pass chose, held against the pass over everything that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.dsa_compare.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY

if TYPE_CHECKING:
    import torch


def reference(
    sampled: torch.Tensor,
    choice: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor | None,
    sampled_accepted: torch.Tensor | None,
    violations: torch.Tensor,
    step: torch.Tensor,
    ring_checks: torch.Tensor,
) -> torch.Tensor:
    """``ring_checks`` [S, BM, 5] with what became of a check at step % S.

    ``sampled`` and ``choice`` [T] are the two passes' choices at every slot (row b·N1 + i is slot i
    of sequence b); ``path`` [B, D1], ``accepted`` [B] are TreeAccept's of the pass that counts,
    ``sampled_accepted`` [B] of the other, all three absent without a tree (the root alone).
    An entry holds, for a sequence: slots of the path; slots of these at which both chose the same;
    drafts that the pass that counts accepted; those that the other did; and the other's broken
    lists, the sum of ``violations`` [layers, B]. Entries past B are left as they were. It stands in
    front of Advance, which makes the entry visible and counts the ``step`` [1].
    """
    import torch

    out, batch = ring_checks.clone(), violations.shape[1]
    nodes = len(choice) // batch
    for b in range(batch):
        slots, drafts = torch.zeros(1, dtype=torch.long), (0, 0)
        if path is not None and accepted is not None and sampled_accepted is not None:
            drafts = int(accepted[b]), int(sampled_accepted[b])
            slots = path[b, : drafts[0] + 1].long()
        rows = b * nodes + slots
        agreed = int((sampled[rows] == choice[rows]).sum())
        entry = [len(slots), agreed, *drafts, int(violations[:, b].sum())]
        out[int(step) % len(out), b] = torch.tensor(entry, dtype=torch.int32)
    return out


_RING = ("S", "BM", "5")

OP = OpSpec(
    name="DsaCompare",
    doc="Compares the choices of a sparse pass with those of the whole one into the ring.",
    inputs=(
        TensorSpec("sampled", "int32", ("T",)),
        TensorSpec("choice", "int32", ("T",)),
        TensorSpec("path", "int32", ("B", "D1"), optional=True),
        TensorSpec("accepted", "int32", ("B",), optional=True),
        TensorSpec("sampled_accepted", "int32", ("B",), optional=True),
        TensorSpec("violations", "int32", ("layers", "B")),
        TensorSpec("step", "int32", ("1",)),
        TensorSpec("ring_checks", "int32", _RING),
    ),
    outputs=(TensorSpec("ring_checks_out", "int32", _RING),),
    attributes=(),
    aliases=(("ring_checks_out", "ring_checks"),),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
