"""``d2t``: which target token a draft token is. EAGLE3 stores offsets; maps are also seen."""

from __future__ import annotations

from typing import Literal

import torch

from specbuild.runtime.errors import SpecbuildError


def read_offsets(
    where: str, d2t: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int
) -> tuple[Literal["offsets", "map"], torch.Tensor]:
    """The form of ``d2t`` [Vd], and the offsets int64 [Vd]: target id = draft id + offset.

    A form is possible if its target ids are unique, lie in the target's vocabulary and, where
    ``t2d`` bool [V] is given, are exactly its members. Raises SpecbuildError if neither form is
    possible, or if both are and they differ: a wrong guess would show as drafts that are refused.
    """
    own = torch.arange(len(d2t))
    values = d2t.long()
    as_offsets, as_map = own + values, values
    offsets, mapped = (_possible(ids, t2d, target_vocab) for ids in (as_offsets, as_map))
    if offsets and mapped and not torch.equal(as_offsets, as_map):
        raise SpecbuildError(
            f"{where}: d2t may hold offsets or target ids, and without t2d nothing tells which; "
            f"add t2d, a bool for each of the target's {target_vocab} tokens"
        )
    if offsets:
        return "offsets", values
    if mapped:
        return "map", values - own
    raise SpecbuildError(f"{where}: d2t {_fault(as_offsets, t2d, target_vocab)}")


def _possible(targets: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int) -> bool:
    return _fault(targets, t2d, target_vocab) is None


def _fault(targets: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int) -> str | None:
    outside = ((targets < 0) | (targets >= target_vocab)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        return (
            f"sends draft token {first} to target token {int(targets[first])}, outside the "
            f"target's vocabulary of {target_vocab}; the draft belongs to another target, or is "
            "damaged"
        )
    ids = targets.sort().values
    repeated = (ids[1:] == ids[:-1]).nonzero().flatten()
    if len(repeated):
        twice = int(ids[repeated[0]])
        return f"sends several draft tokens to target token {twice}; each needs one of its own"
    if t2d is not None:
        members = t2d.nonzero().flatten()
        if not torch.equal(members, ids):
            return (
                f"and t2d disagree: {len(ids)} target tokens by d2t, {len(members)} by t2d, not "
                "the same; one of the two belongs to another draft"
            )
    return None
