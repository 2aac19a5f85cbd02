"""``d2t``: the target token of each draft token, as EAGLE3's offsets or as a map."""

from __future__ import annotations

from typing import Literal

import torch

from specbuild.runtime.errors import SpecbuildError


def read_offsets(
    where: str, d2t: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int
) -> tuple[Literal["offsets", "map"], torch.Tensor]:
    """Return the form of ``d2t`` [Vd], and offsets int64 [Vd]: target id = draft id + offset.

    A form is possible if its target ids are unique, in the target's vocabulary, and equal to the
    members of ``t2d`` bool [V], if present. Raises SpecbuildError if neither form is possible, or
    both are and differ: a wrong form would only show as rejected draft tokens.
    """
    draft_ids = torch.arange(len(d2t))
    values = d2t.long()
    ids_by_offsets, ids_by_map = draft_ids + values, values
    is_offsets, is_map = (_possible(ids, t2d, target_vocab) for ids in (ids_by_offsets, ids_by_map))
    if is_offsets and is_map and not torch.equal(ids_by_offsets, ids_by_map):
        raise SpecbuildError(
            f"{where}: d2t can be offsets or target ids, which only t2d distinguishes; add t2d, a "
            f"bool for each of the target's {target_vocab} tokens"
        )
    if is_offsets:
        return "offsets", values
    if is_map:
        return "map", values - draft_ids
    raise SpecbuildError(f"{where}: d2t {_fault(ids_by_offsets, t2d, target_vocab)}")


def _possible(targets: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int) -> bool:
    return _fault(targets, t2d, target_vocab) is None


def _fault(targets: torch.Tensor, t2d: torch.Tensor | None, target_vocab: int) -> str | None:
    outside = ((targets < 0) | (targets >= target_vocab)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        return (
            f"maps draft token {first} to target token {int(targets[first])}, outside the target's "
            f"vocabulary of {target_vocab}; the draft belongs to another target, or is damaged"
        )
    ids = targets.sort().values
    repeated = (ids[1:] == ids[:-1]).nonzero().flatten()
    if len(repeated):
        duplicate = int(ids[repeated[0]])
        return (
            f"maps several draft tokens to target token {duplicate}; target tokens must be unique"
        )
    if t2d is not None:
        members = t2d.nonzero().flatten()
        if not torch.equal(members, ids):
            return (
                f"and t2d disagree: d2t has {len(ids)} target tokens and t2d {len(members)}, which "
                "differ; one of them belongs to another draft"
            )
    return None
