"""LazyGatedDelta: GatedDelta and its gated norm; the next launch commits a step's rows.

A recurrent state cannot be rewound, and a copy of it per row of a draft is large. A step therefore
stores the change of each row: e^g, the key k and the difference δ. The next launch applies those of
the accepted rows, S ← e^g·S + k⊗δ, by the operations of the rows themselves. The state after any
accepted path therefore has the bits of single steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbuild.plugins_cuda.gated_delta.op import NORM_EPS, STATE_AXES
from specbuild.plugins_cuda.lazy_gated_delta.lowering import lower, tactics
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.traffic import TrafficRequest, stored_terms
from specbuild.runtime.engine_dir.traffic import Traffic

if TYPE_CHECKING:
    import torch

WINDOW_AXES = ("slots", "window", "C")
FACTOR_AXES = ("slots", "nodes", "F")


def reference(
    rows: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_scale: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    row_start: torch.Tensor,
    ancestor_bits: torch.Tensor,
    state_slot: torch.Tensor,
    replay_path: torch.Tensor,
    replay_count: torch.Tensor,
    tail_pool: torch.Tensor,
    state_pool: torch.Tensor,
    factor_pool: torch.Tensor,
    *,
    key_heads: int,
    eps: float,
    stores: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalized and gated values of all rows [T, Hv·Dv], and the three pools.

    ``rows`` [T, W] are the outputs of the projections, side by side: the convolution's inputs [C]
    (queries, keys, values), the gate of the output [Hv·Dv], the logits of β and of the decay of
    each value head, then padding. Sequence b has the rows from ``row_start[b]`` up to ``row_start[b
    + 1]`` and the slot ``state_slot[b]`` of every pool. ``state_pool`` [Hv, Dk, Dv] is its state.
    ``tail_pool`` [taps − 1 + N1, C] has the convolution's inputs: those before the last step's
    rows, then those of the rows. ``factor_pool`` [N1, Hv·Dv + Hk·Dk + Hv] has δ, k and e^g of the
    last step's rows.

    First the accepted rows of the last step, ``replay_path[b, : replay_count[b]]``, are applied.
    Then the sequence's rows follow. With ``stores`` 0 they are nodes of a tree by ``ancestor_bits``
    [T, words] (bit i of a row: node i is the row itself or an ancestor; the first row is the root).
    The slot keeps the state before them, and stores their inputs and factors. With ``stores`` 1
    they are a chain, and the slot stores the state and the inputs after the last one.

    A sequence whose first row has position 0 starts from zeros with ``stores``. Without, it is
    padding: its outputs are zeros, and its slot does not change. Outputs of rows of no sequence are
    unspecified.
    """
    import torch

    layer = _Layer(key_heads, state_pool.shape[1:], conv_weight, decay_scale, dt_bias, norm, eps)
    channels, taps = layer.channels, conv_weight.shape[2]
    outputs = rows.new_zeros(len(rows), layer.values)
    tails, states, factors = tail_pool.clone(), state_pool.clone(), factor_pool.clone()

    for b, slot in enumerate(state_slot.tolist()):
        first, last = row_start[b : b + 2].tolist()
        if first == last or (positions[first] == 0 and not stores):
            continue
        tail, state = tail_pool[slot, : taps - 1], state_pool[slot]
        if positions[first] == 0:
            tail, state = torch.zeros_like(tail), torch.zeros_like(state)
        else:
            path = replay_path[b, : int(replay_count[b])].long()
            tail = torch.cat([tail, tail_pool[slot, taps - 1 + path]])[-(taps - 1) :]
            for factor in factor_pool[slot, path]:
                state = layer.replayed(state, factor)
        tails[slot, : taps - 1], states[slot] = tail, state
        after: list[torch.Tensor] = []
        windows: list[torch.Tensor] = []
        for node, row in enumerate(range(first, last)):
            parent = node - 1 if stores else _parent(ancestor_bits[row].tolist(), node)
            window = torch.cat(
                [windows[parent] if parent >= 0 else tail, rows[row : row + 1, :channels]]
            )
            before = after[parent] if parent >= 0 else state
            outputs[row], factor = layer.row_after(before, window, rows[row])
            after.append(layer.replayed(before, factor))
            windows.append(window[1:])
            if not stores:
                tails[slot, taps - 1 + node] = window[-1]
                factors[slot, node] = factor
        if stores:
            tails[slot, : taps - 1], states[slot] = windows[-1], after[-1]
    return outputs, tails, states, factors


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer; ``state`` is [Hv, Dk, Dv]."""

    key_heads: int
    state: Sequence[int]
    conv_weight: torch.Tensor
    decay_scale: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float

    @property
    def channels(self) -> int:
        """Inputs of the convolution."""
        return self.conv_weight.shape[0]

    @property
    def values(self) -> int:
        """Values of all heads."""
        return self.state[0] * self.state[2]

    @property
    def keys(self) -> int:
        """Elements of all keys."""
        return self.key_heads * self.state[1]

    def _of_value_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.state[0] // self.key_heads, 0)

    def replayed(self, state: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the state after a row with these factors."""
        heads, width, value_width = self.state
        change, key, decay = factor.split([self.values, self.keys, heads])
        key = self._of_value_heads(key.view(self.key_heads, width))
        state = state * decay[:, None, None]
        return state + key[:, :, None] * change.view(heads, 1, value_width)

    def row_after(
        self, state: torch.Tensor, window: torch.Tensor, row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of a row after ``state``, with inputs ending ``window``, and its
        factors.
        """
        import torch
        from torch.nn import functional as F

        heads, width, value_width = self.state
        sizes = [self.channels, self.values, heads, heads]
        _, gate, beta, decay, _ = row.split([*sizes, len(row) - sum(sizes)])
        mixed = (window.float().T * self.conv_weight[:, 0].float()).sum(1)
        mixed = F.silu(mixed.to(row.dtype)).float()
        q, k, v = mixed.split([self.keys, self.keys, self.values])
        q, k = (part.view(self.key_heads, width) for part in (q, k))
        q, k = (x * (x.square().sum(1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
        decay = (self.decay_scale * F.softplus(decay.float() + self.dt_bias)).exp()
        kept = (state * decay[:, None, None] * self._of_value_heads(k)[:, :, None]).sum(1)
        change = (v.view(heads, value_width) - kept) * beta.sigmoid().float()[:, None]
        factor = torch.cat([change.flatten(), k.flatten(), decay])
        query = self._of_value_heads(q * width**-0.5)
        mixed = (self.replayed(state, factor) * query[:, :, None]).sum(1).to(row.dtype)
        normed = rms_norm(mixed, self.norm, self.eps, "llama").float()
        return (normed.flatten() * F.silu(gate.float())).to(row.dtype), factor


def _parent(words: list[int], node: int) -> int:
    """Return the last node before ``node`` whose bit is set, −1 for a root."""
    return next((i for i in range(node - 1, -1, -1) if words[i // 32] >> i % 32 & 1), -1)


def _traffic(request: TrafficRequest) -> Traffic:
    """Return the traffic: weights of convolution and gates; states are no tokens of a cache."""
    return Traffic(read=stored_terms(request), operations=())


OP = OpSpec(
    name="LazyGatedDelta",
    doc="GatedDelta and its gated norm; the next launch commits the rows that were accepted.",
    inputs=(
        TensorSpec("rows", "T", ("T", "W")),
        TensorSpec("conv_weight", "T", ("C", "1", "taps")),
        TensorSpec("decay_scale", "float32", ("Hv",)),
        TensorSpec("dt_bias", "float32", ("Hv",)),
        TensorSpec("norm", "T", ("Dv",)),
        TensorSpec("positions", "int32", ("T",)),
        TensorSpec("row_start", "int32", ("B1",)),
        TensorSpec("ancestor_bits", "int32", ("T", "words")),
        TensorSpec("state_slot", "int32", ("B",)),
        TensorSpec("replay_path", "int32", ("B", "D1")),
        TensorSpec("replay_count", "int32", ("B",)),
        TensorSpec("tail_pool", "T", WINDOW_AXES),
        TensorSpec("state_pool", "float32", STATE_AXES),
        TensorSpec("factor_pool", "float32", FACTOR_AXES),
    ),
    outputs=(
        TensorSpec("output", "T", ("T", "V")),
        TensorSpec("tail_pool_out", "T", WINDOW_AXES),
        TensorSpec("state_pool_out", "float32", STATE_AXES),
        TensorSpec("factor_pool_out", "float32", FACTOR_AXES),
    ),
    attributes=(
        AttributeSpec("key_heads", int),
        AttributeSpec("eps", float),
        AttributeSpec("stores", int, 0),
    ),
    aliases=(
        ("tail_pool_out", "tail_pool"),
        ("state_pool_out", "state_pool"),
        ("factor_pool_out", "factor_pool"),
    ),
    reference=reference,
    lower=lower,
    tactics=tactics,
    traffic=_traffic,
)
