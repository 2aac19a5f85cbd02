"""TreeAccept: the longest path of the draft tree that the target's samples confirm."""

from __future__ import annotations

from itertools import pairwise
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
    row_start: torch.Tensor | None = None,
    *,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk from the root: node i matches if ``choice[parent_i] == token_i``.

    ``tokens``, ``parents`` [B, N+1], ``ancestor_bits`` [B, N+1, W], ``count`` [B] are the outputs
    of TreeSelect, ``choice`` is [B, N+1]. With ``row_start`` [B+1], ``choice`` is [1, T]: that of
    slot i is in row ``row_start[b]`` + i, and a sequence without rows has choice 0 at its root.

    A node is accepted if it and all its ancestors match. Siblings have different tokens, so the
    deepest accepted node is unique. Returns path [B, depth+1] (the root's slot 0, then the accepted
    slots, padded with -1), accepted [B] (accepted draft tokens) and next_token [B], the target's
    choice at the end of the path.
    """
    import torch

    del ancestor_bits  # used by the closed form of the body; this walk uses the parents
    batch, nodes = tokens.shape
    if row_start is not None:
        row_choices, choice = choice.flatten(), torch.zeros(batch, nodes, dtype=torch.int32)
        for b, (first, last) in enumerate(pairwise(row_start.tolist())):
            held = min(last - first, nodes)
            choice[b, :held] = row_choices[first : first + held]
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
        TensorSpec("choice", "int32", ("choices", "of_each")),
        TensorSpec("row_start", "int32", ("B1",), optional=True),
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
