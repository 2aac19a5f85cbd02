"""GatedDelta: a convolution and a recurrent state over the rows of a sequence.

Rows are launched along paths: a chain of committed tokens, or one path from the root of a draft
tree to each of its leaves. A path starts from a stored state and may store the state after its last
row. The result of a row depends only on the rows before it on its path. A launch of n rows
therefore equals n launches of one row, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.gated_delta.body import body
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec

if TYPE_CHECKING:
    import torch

# Added to the sum of squares of a head of queries or keys.
NORM_EPS = 1e-6
TAIL_AXES = ("slots", "tail", "C")
STATE_AXES = ("slots", "Hv", "Dk", "Dv")


def reference(
    inputs: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_scale: torch.Tensor,
    dt_bias: torch.Tensor,
    path_rows: torch.Tensor,
    read_slot: torch.Tensor,
    write_slot: torch.Tensor,
    tail_pool: torch.Tensor,
    state_pool: torch.Tensor,
    *,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs of all rows [T, Hv, Dv], and both pools.

    ``inputs`` [T, C + 2·Hv] are the outputs of the projections: queries, keys and values side by
    side, then the logits of β and of the decay of each value head. Value head h reads key head
    ⌊h·Hk/Hv⌋. A path processes the rows ``path_rows[p]`` (−1: no row). It starts from the state and
    the convolution's last inputs in slot ``read_slot[p]``, and stores those after its last row in
    ``write_slot[p]``. Outputs of rows on no path are unspecified.
    """
    import torch
    from torch.nn import functional as F

    _, value_heads, key_width, value_width = state_pool.shape
    channels, kind = tail_pool.shape[2], inputs.dtype
    outputs = inputs.new_zeros(len(inputs), value_heads, value_width)
    new_tails, new_states = tail_pool.clone(), state_pool.clone()
    for rows, read, write in zip(
        path_rows.tolist(), read_slot.tolist(), write_slot.tolist(), strict=True
    ):
        tail, state = tail_pool[read].clone(), state_pool[read].clone()
        for row in rows:
            if row < 0:
                continue
            mixed, beta, decay = inputs[row].split([channels, value_heads, value_heads])
            window = torch.cat([tail, mixed[None]])
            tail = window[1:]
            mixed = F.silu((window.float().T * conv_weight[:, 0].float()).sum(1).to(kind)).float()
            q, k, v = mixed.split(
                [key_heads * key_width, key_heads * key_width, value_heads * value_width]
            )
            q, k = (part.view(key_heads, key_width) for part in (q, k))
            q, k = (x * (x.square().sum(1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
            q = q * key_width**-0.5
            q, k = (x.repeat_interleave(value_heads // key_heads, 0) for x in (q, k))
            log_decay = decay_scale.float() * F.softplus(decay.float() + dt_bias.float())
            state = state * log_decay.exp()[:, None, None]
            kept = (state * k[:, :, None]).sum(1)
            change = (v.view(value_heads, value_width) - kept) * beta.sigmoid().float()[:, None]
            state = state + k[:, :, None] * change[:, None, :]
            outputs[row] = (state * q[:, :, None]).sum(1).to(kind)
        new_tails[write], new_states[write] = tail, state
    return outputs, new_tails, new_states


OP = OpSpec(
    name="GatedDelta",
    doc="Convolution, gates and recurrence of gated delta nets along paths of rows.",
    inputs=(
        TensorSpec("inputs", "T", ("T", "W")),
        TensorSpec("conv_weight", "T", ("C", "1", "taps")),
        TensorSpec("decay_scale", "float32", ("Hv",)),
        TensorSpec("dt_bias", "float32", ("Hv",)),
        TensorSpec("path_rows", "int32", ("S", "L")),
        TensorSpec("read_slot", "int32", ("S",)),
        TensorSpec("write_slot", "int32", ("S",)),
        TensorSpec("tail_pool", "T", TAIL_AXES, body_axes=TAIL_AXES),
        TensorSpec("state_pool", "float32", STATE_AXES, body_axes=STATE_AXES),
    ),
    outputs=(
        TensorSpec("output", "T", ("T", "Hv", "Dv")),
        TensorSpec("tail_pool_out", "T", TAIL_AXES, body_axes=TAIL_AXES),
        TensorSpec("state_pool_out", "float32", STATE_AXES, body_axes=STATE_AXES),
    ),
    attributes=(AttributeSpec("key_heads", int),),
    aliases=(("tail_pool_out", "tail_pool"), ("state_pool_out", "state_pool")),
    reference=reference,
    body=body,
)
