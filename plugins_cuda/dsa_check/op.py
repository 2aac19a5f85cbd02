"""DsaCheck: broken lists of selected slots are replaced by full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.dsa_check.body import body
from specbuild.plugins_cuda.dsa_check.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.op import visibility
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

_LIST_AXES = ("T", "N", "S")


def holds(listed: list[int], seen: set[int], kept: set[int], *, sparse: bool, budget: int) -> bool:
    """Return whether a row's list [S] is a valid output of DsaIndexer.

    The list of a whole row is the mark alone. The list of a sparse row has visible slots, rising
    and without repetition: all mandatory ones, and ``budget`` others (or all others, if there are
    fewer). It is padded with −1.
    """
    if not sparse:
        return listed == [WHOLE, *[-1] * (len(listed) - 1)]
    count = min(len(seen), len(kept) + budget)
    slots = listed[:count]
    return (
        slots == sorted(set(slots))
        and len(slots) == count
        and kept <= set(slots) <= seen
        and listed[count:] == [-1] * (len(listed) - count)
    )


def reference(
    selected: torch.Tensor,
    row_start: torch.Tensor,
    row_slot: torch.Tensor,
    tree_start: torch.Tensor,
    ancestor_bits: torch.Tensor,
    positions: torch.Tensor,
    budget: torch.Tensor,
    *,
    threshold: int,
    first_tokens: int,
    recent_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``selected`` [T, N, S] of DsaIndexer, and the number of broken lists per sequence [B].

    :func:`holds` defines valid lists; they depend on the position of a row, not on scores. If a
    list of a sequence is broken, every row of the sequence attends to all visible slots. Rows of no
    sequence are not changed.
    """
    import torch

    checked, violations = selected.clone(), torch.zeros_like(budget)
    for b in range(len(budget)):
        rows = slice(int(row_start[b]), int(row_start[b + 1]))
        start, allowed = int(tree_start[b]), int(budget[b])
        keys = start + 32 * ancestor_bits.shape[1]
        place = (row_slot[rows].long(), start, ancestor_bits[rows], keys)
        seen, near = visibility(*place, 0), visibility(*place, recent_tokens)
        for i, lists in enumerate(selected[rows].tolist()):
            sees = set(seen[i].nonzero().flatten().tolist())
            recent = set(near[i].nonzero().flatten().tolist())
            kept = {s for s in sees if s < first_tokens or s in recent or s >= start}
            sparse = allowed >= 0 and int(positions[rows][i]) >= threshold
            violations[b] += sum(
                not holds(listed, sees, kept, sparse=sparse, budget=allowed) for listed in lists
            )
        if violations[b]:
            checked[rows] = -1
            checked[rows, :, 0] = WHOLE
    return checked, violations


OP = OpSpec(
    name="DsaCheck",
    doc="Replaces lists of selected slots that break an invariant by full attention; counts them.",
    inputs=(
        TensorSpec("selected", "int32", _LIST_AXES),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("row_slot", "int32", ("T",)),
        TensorSpec("tree_start", "int32", ("B",)),
        TensorSpec("ancestor_bits", "int32", ("T", "W")),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("budget", "int32", ("B",)),
    ),
    outputs=(
        TensorSpec("checked", "int32", _LIST_AXES),
        TensorSpec("violations", "int32", ("B",)),
    ),
    attributes=(
        AttributeSpec("threshold", int),
        AttributeSpec("first_tokens", int),
        AttributeSpec("recent_tokens", int),
    ),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("lists were written by the launch in front and stay in the L2 cache"),
)
