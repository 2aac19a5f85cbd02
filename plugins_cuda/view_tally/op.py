"""ViewTally: count the tokens of partial steps that full attention samples too, for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_tally.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    choice: torch.Tensor,
    sample_sequence: torch.Tensor,
    sample_token: torch.Tensor,
    fed_again: torch.Tensor,
    step: torch.Tensor,
    ring_rechecked: torch.Tensor,
    ring_agreed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the agreement of samples at step % S of ``ring_rechecked``, ``ring_agreed`` [S, BM].

    The last entries of ``choice`` [N] belong to ViewSamples' samples: ``sample_token`` [samples]
    was emitted there by ``sample_sequence`` [samples], −1 for no sample. Each of the B sequences of
    ``fed_again`` [B] gets the number of its samples, and the number of those whose choice equals
    the token. Entries past B are not written. The op runs before Advance, which makes the entries
    visible and increments ``step`` [1].
    """
    rechecked, agreed = ring_rechecked.clone(), ring_agreed.clone()
    ring_entry = int(step) % len(rechecked)
    same = choice[len(choice) - len(sample_token) :] == sample_token
    for b in range(len(fed_again)):
        own = sample_sequence == b
        rechecked[ring_entry, b] = int(own.sum())
        agreed[ring_entry, b] = int((own & same).sum())
    return rechecked, agreed


_RINGS = tuple(TensorSpec(name, "int32", ("S", "BM")) for name in ("ring_rechecked", "ring_agreed"))

OP = OpSpec(
    name="ViewTally",
    doc="Counts what the target samples at sampled re-verified tokens, for the host (SpecPV).",
    inputs=(
        TensorSpec("choice", "int32", ("N",)),
        TensorSpec("sample_sequence", "int32", ("samples",)),
        TensorSpec("sample_token", "int32", ("samples",)),
        TensorSpec("fed_again", "int32", ("B",)),
        TensorSpec("step", "int32", ("1",)),
        *_RINGS,
    ),
    outputs=tuple(TensorSpec(f"{ring.name}_out", ring.dtype, ring.axes) for ring in _RINGS),
    attributes=(),
    aliases=tuple((f"{ring.name}_out", ring.name) for ring in _RINGS),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
