"""ViewSamples: select re-verified tokens at which the target samples too (SpecPV)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.plugins_cuda.view_samples.lowering import lower

if TYPE_CHECKING:
    import torch


def reference(
    row_token_ids: torch.Tensor,
    row_positions: torch.Tensor,
    row_start: torch.Tensor,
    logit_rows: torch.Tensor,
    fed_again: torch.Tensor,
    row_temperature: torch.Tensor,
    row_top_k: torch.Tensor,
    row_top_p: torch.Tensor,
    row_seed: torch.Tensor,
    positions: torch.Tensor,
    row_floor: torch.Tensor | None = None,
    *,
    samples: int,
) -> tuple[torch.Tensor, ...]:
    """Append ``samples`` of the re-verified rows to the R tree rows, N = R + samples.

    ``row_token_ids``, ``row_positions`` [T], ``row_start`` [B1], ``logit_rows`` [R = B·N1] and
    ``fed_again`` [B] are ViewInputs' outputs. If a sequence is ``fed_again``, rows row_start[b] …
    logit_rows[b·N1] − 1 are its chain, and the token of the next row is the one that was emitted
    after each. The C chain rows of all sequences are divided into ``samples`` even strata. Of
    stratum [lo, hi) row lo + (position of lo) mod (hi − lo) is selected. If C ≤ ``samples``, every
    row is selected, and empty strata select none.

    temperature, top_k, top_p, seed and floor are those of the sequence's root (``row_…`` [R]; floor
    is 0 by default); position is that of the row. ``sample_sequence`` [samples] is the sequence
    that emitted ``sample_token`` [samples] there. It is −1 for an empty stratum, whose row is the
    first tree's root with greedy sampling.
    """
    import torch

    batch, rows = len(fed_again), len(logit_rows)
    nodes = rows // batch
    chains = [
        (b, row)
        for b in range(batch)
        if fed_again[b]
        for row in range(int(row_start[b]), int(logit_rows[b * nodes]))
    ]
    out_rows = torch.cat([logit_rows, logit_rows[:1].expand(samples)])
    if row_floor is None:
        row_floor = torch.zeros_like(row_top_p)
    inputs = (row_temperature, row_top_k, row_top_p, row_seed, row_floor, positions)
    defaults = (0.0, 0, 1.0, 0, 0.0, 0)
    how = [
        torch.cat([t, torch.full((samples,), u, dtype=t.dtype)])
        for t, u in zip(inputs, defaults, strict=True)
    ]
    sequence = torch.full((samples,), -1, dtype=torch.int32)
    token = torch.zeros(samples, dtype=torch.int32)
    for j in range(samples):
        low, high = j * len(chains) // samples, (j + 1) * len(chains) // samples
        if low == high:
            continue
        turn = int(row_positions[chains[low][1]]) % (high - low)
        b, row = chains[low + turn]
        out_rows[rows + j] = row
        for out, source in zip(how[:5], inputs[:5], strict=True):
            out[rows + j] = source[b * nodes]
        how[5][rows + j] = row_positions[row]
        sequence[j], token[j] = b, row_token_ids[row + 1]
    return (out_rows, *how[:4], how[5], sequence, token, how[4])


OP = OpSpec(
    name="ViewSamples",
    doc="Adds a few of the re-verified tokens to the rows at which the target samples (SpecPV).",
    inputs=(
        TensorSpec("row_token_ids", "int32", ("T",)),
        TensorSpec("row_positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("logit_rows", "int32", ("R",)),
        TensorSpec("fed_again", "int32", ("B",)),
        TensorSpec("row_temperature", "float32", ("R",)),
        TensorSpec("row_top_k", "int32", ("R",)),
        TensorSpec("row_top_p", "float32", ("R",)),
        TensorSpec("row_seed", "int32", ("R",)),
        TensorSpec("positions", "int32", ("R",)),
        TensorSpec("row_floor", "float32", ("R",), optional=True),
    ),
    outputs=(
        TensorSpec("chosen_rows", "int32", ("N",)),
        TensorSpec("temperature", "float32", ("N",)),
        TensorSpec("top_k", "int32", ("N",)),
        TensorSpec("top_p", "float32", ("N",)),
        TensorSpec("seed", "int32", ("N",)),
        TensorSpec("position", "int32", ("N",)),
        TensorSpec("sample_sequence", "int32", ("samples",)),
        TensorSpec("sample_token", "int32", ("samples",)),
        TensorSpec("floor", "float32", ("N",)),
    ),
    attributes=(AttributeSpec("samples", int),),
    reference=reference,
    lower=lower,
    traffic=STATE_ONLY,
)
