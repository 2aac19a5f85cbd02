"""ReplayPath: the rows of a launch that the next one applies to the recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.replay_path.lowering import lower
from specbuild.plugins_cuda.traffic import STATE_ONLY

if TYPE_CHECKING:
    import torch


def reference(
    path: torch.Tensor | None,
    accepted: torch.Tensor | None,
    positions: torch.Tensor,
    row_start: torch.Tensor,
    replay_path: torch.Tensor,
    replay_count: torch.Tensor,
    *,
    stores: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``replay_path`` [B, M] and ``replay_count`` [B] after a launch, in place.

    After a step they are the slots of ``path`` [B, D1] up to ``accepted`` [B], the outputs of
    TreeAccept; without a tree these are absent, and only the root is applied. After a launch that
    stores its states (``stores``) the count is 0. Sequences without rows do not change. Padding of
    a step does not change them either: its rows are at position 0.
    """
    replay_path, replay_count = replay_path.clone(), replay_count.clone()
    for b in range(len(replay_count)):
        first, last = row_start[b : b + 2].tolist()
        if first == last or (positions[first] == 0 and not stores):
            continue
        count = 0
        if not stores:
            count = 1 if accepted is None else int(accepted[b]) + 1
            replay_path[b, :count] = 0 if path is None else path[b, :count]
        replay_count[b] = count
    return replay_path, replay_count


_IN_PLACE = (
    TensorSpec("replay_path", "int32", ("B", "M")),
    TensorSpec("replay_count", "int32", ("B",)),
)

OP = OpSpec(
    name="ReplayPath",
    doc="The accepted rows that the next launch applies to the recurrent states.",
    inputs=(
        TensorSpec("path", "int32", ("B", "D1"), optional=True),
        TensorSpec("accepted", "int32", ("B",), optional=True),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        *_IN_PLACE,
    ),
    outputs=tuple(TensorSpec(f"{spec.name}_out", spec.dtype, spec.axes) for spec in _IN_PLACE),
    attributes=(AttributeSpec("stores", int),),
    aliases=tuple((f"{spec.name}_out", spec.name) for spec in _IN_PLACE),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
