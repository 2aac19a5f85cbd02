"""DsaCompare: compare the choices of a sparse pass with those of the full pass."""

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
    """Return ``ring_checks`` [S, BM, 5] with the results of a check at step % S.

    ``sampled`` and ``choice`` [T] are the choices of the sparse and of the full pass at every slot
    (row b·N1 + i is slot i of sequence b). ``path`` [B, D1], ``accepted`` [B] are TreeAccept's
    outputs for the full pass, ``sampled_accepted`` [B] for the sparse one. All three are absent
    without a tree (root only).

    An entry has, per sequence: slots of the path; slots of the path with equal choices; draft
    tokens that the full pass accepted; those that the sparse pass accepted; broken lists of the
    sparse pass, the sum of ``violations`` [layers, B]. Entries past B are not written. The op runs
    before Advance, which makes the entry visible and increments ``step`` [1].
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
    doc="Compares the choices of a sparse pass with those of the full one, in the ring.",
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
