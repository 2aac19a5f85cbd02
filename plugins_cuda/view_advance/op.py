"""ViewAdvance: update the exact tokens, and store tokens that a full step will re-verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_advance.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    path: torch.Tensor | None,
    length: torch.Tensor,
    done: torch.Tensor,
    fed_again: torch.Tensor,
    blocks: torch.Tensor,
    verified_len: torch.Tensor,
    view_blocks: torch.Tensor,
    summarised: torch.Tensor,
    buffered_tokens: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the state of views after Advance, which added the emitted tokens to ``length`` [B].

    ``token_ids``, ``positions`` [R] are those of VerifyInputs' rows; ``path`` [B, D1] is
    TreeAccept's, absent without a tree. The tokens committed in this step are in the path's first
    slots. The token at position x is stored in ``buffered_tokens[b, x mod F]``. After a full step
    (``fed_again``), all tokens are exact, ``blocks`` are summarized, and the view selects from them
    (−1: none). A sequence that is ``done`` does not change.
    """
    verified, views = verified_len.clone(), view_blocks.clone()
    summaries, buffered = summarised.clone(), buffered_tokens.clone()
    nodes = len(token_ids) // len(length)
    for b in range(len(length)):
        if done[b]:
            continue
        start = int(positions[b * nodes])
        for i in range(int(length[b]) - start):
            slot = 0 if path is None else int(path[b, i])
            buffered[b, (start + i) % buffered.shape[1]] = token_ids[b * nodes + slot]
        if fed_again[b]:
            verified[b], views[b] = length[b], blocks[b]
            summaries[b] = max(int(summaries[b]), int(blocks[b]))
    return verified, views, summaries, buffered


_STATE = (
    TensorSpec("verified_len", "int32", ("B",)),
    TensorSpec("view_blocks", "int32", ("B",)),
    TensorSpec("summarised", "int32", ("B",)),
    TensorSpec("buffered_tokens", "int32", ("B", "F")),
)

OP = OpSpec(
    name="ViewAdvance",
    doc="Moves the state of partial views to the next step (SpecPV).",
    inputs=(
        TensorSpec("token_ids", "int32", ("R",)),
        TensorSpec("positions", "int32", ("R",)),
        TensorSpec("path", "int32", ("B", "D1"), optional=True),
        TensorSpec("length", "int32", ("B",)),
        TensorSpec("done", "int32", ("B",)),
        TensorSpec("fed_again", "int32", ("B",)),
        TensorSpec("blocks", "int32", ("B",)),
        *_STATE,
    ),
    outputs=tuple(TensorSpec(f"{s.name}_out", s.dtype, s.axes) for s in _STATE),
    attributes=(),
    aliases=tuple((f"{s.name}_out", s.name) for s in _STATE),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
