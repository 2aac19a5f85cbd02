"""TreeAccept: the longest path of the draft tree that the target's samples confirm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import Weights
from specbuild.plugins_cuda.tree_accept.body import body
from specbuild.plugins_cuda.tree_accept.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    ancestor_bits: torch.Tensor,
    count: torch.Tensor,
    choice: torch.Tensor,
    *,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks from the root: node i matches when ``choice[parent_i] == token_i``.

    ``tokens``, ``parents`` [B, N+1], ``ancestor_bits`` [B, N+1, W], ``count`` [B] as TreeSelect
    gives them, ``choice`` [B, N+1]. A node is accepted when it and all its ancestors match;
    siblings differ, so the deepest one is unique. Returns path [B, depth+1] (the root's slot 0,
    then the accepted slots, -1 padded), accepted [B] (drafts on the path) and next_token [B],
    the target's choice at the path's end.
    """
    import torch

    del ancestor_bits  # the body's closed form reads them; the walk follows the parents
    batch = tokens.shape[0]
    path = torch.full((batch, depth + 1), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    next_token = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        node, steps = 0, 0
        path[b, 0] = 0
        while True:
            children = [
                i
                for i in range(1, int(count[b]))
                if parents[b, i] == node and tokens[b, i] == choice[b, node]
            ]
            if not children:
                break
            node, steps = children[0], steps + 1
            path[b, steps] = node
        accepted[b] = steps
        next_token[b] = choice[b, node]
    return path, accepted, next_token


OP = OpSpec(
    name="TreeAccept",
    doc="The target's choices and the tree to the longest accepted path and the next token.",
    inputs=(
        TensorSpec("tokens", "int32", ("B", "N1")),
        TensorSpec("parents", "int32", ("B", "N1")),
        TensorSpec("ancestor_bits", "int32", ("B", "N1", "W")),
        TensorSpec("count", "int32", ("B",)),
        TensorSpec("choice", "int32", ("B", "N1")),
    ),
    outputs=(
        TensorSpec("path", "int32", ("B", "D1")),
        TensorSpec("accepted", "int32", ("B",)),
        TensorSpec("next_token", "int32", ("B",)),
    ),
    attributes=(AttributeSpec("depth", int),),
    reference=reference,
    body=body,
    lower=lower,
    traffic=Weights(),
)
