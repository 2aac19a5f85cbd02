"""The effect of errors in a layer's keys and values.

An error e of a value affects the hidden states through the output projections of the heads that
share it: ``Σ_h ‖W_o,h e‖²``. An error e of a key, before its rotation, changes the scores of these
heads' queries at distance Δ by ``q · R(−Δ) e``. Its weight is the mean square over queries and
distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.families.parts.rope import rope_tables
from specbuild.plugins_cuda.mla_attention.op import rotated
from specbuild.runtime.engine_dir.geometry import TargetGeometry

# A sample of the distances between a query and a key.
DISTANCES = range(0, 128, 4)


@dataclass(frozen=True)
class InputMoments:
    """Moments of a layer's normed inputs x: ``second`` E[x xᵀ] [H, H], ``mean`` [H]; fp64."""

    second: torch.Tensor
    mean: torch.Tensor


def moments_of(normed: torch.Tensor) -> InputMoments:
    """Return the moments of ``normed`` [..., H]."""
    rows = normed.flatten(0, -2).double()
    return InputMoments(rows.T @ rows / len(rows), rows.mean(0))


def query_moment(weight: torch.Tensor, bias: torch.Tensor, inputs: InputMoments) -> torch.Tensor:
    """Return E[q qᵀ] [Q, Q] of ``q = W x + b`` before rotation; ``weight`` [Q, H], ``bias`` [Q]."""
    mixed = torch.outer(weight @ inputs.mean, bias)
    return weight @ inputs.second @ weight.T + mixed + mixed.T + torch.outer(bias, bias)


def key_metric(g: TargetGeometry, moment: torch.Tensor) -> torch.Tensor:
    """Return the weights of errors in keys, [kv_width, kv_width], by queries' ``moment`` [Q, Q]."""
    cos, sin = rope_tables(g.rope, g.head_dim, DISTANCES.stop)
    identity = torch.eye(g.head_dim).unsqueeze(1)
    total = torch.zeros(g.kv_heads, g.head_dim, g.head_dim, dtype=torch.float64)
    shared = _shared_blocks(moment, g)
    for distance in DISTANCES:
        at = torch.full((g.head_dim,), distance)
        # Row i is R(Δ) e_i, so this is the transpose, which rotates a key back by its distance.
        back = rotated(identity, cos, sin, at).squeeze(1).double()
        total += back.T @ shared @ back / len(DISTANCES)
    return torch.block_diag(*total)


def value_metric(g: TargetGeometry, output: torch.Tensor) -> torch.Tensor:
    """Return the weights of errors in values, [kv_width, kv_width]; ``output`` is W_o [H, Q]."""
    return torch.block_diag(*_shared_blocks(output.T @ output, g))


def _shared_blocks(square: torch.Tensor, g: TargetGeometry) -> torch.Tensor:
    """Return the diagonal blocks of [Q, Q], summed over heads that share a KV head: [Hkv, D, D]."""
    blocks = square.unflatten(1, (g.q_heads, -1)).unflatten(0, (g.q_heads, -1))
    head_blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return head_blocks.unflatten(0, (g.kv_heads, -1)).sum(1)
