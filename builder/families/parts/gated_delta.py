"""Linear attention by the gated delta rule: the layer, and its tensors on disk and in engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.checkpoint.source import TORCH_DTYPES, SourceTensor, Tensors, remade
from specbuild.builder.families.parts.graph_io import (
    InputPort,
    Launch,
    StatePools,
    StateView,
    WrittenStates,
)
from specbuild.builder.families.parts.llama import LlamaNorm
from specbuild.builder.families.parts.tensor_shapes import Shapes
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.geometry import GatedDelta, TargetGeometry

NAME = "linear_attn"


class GatedDeltaNet(nn.Module):
    """Linear attention with a recurrent state instead of keys and values.

    ``in_proj`` returns queries, keys and values, then the logits of β and decay per value head.
    """

    blocks = indexer = None

    def __init__(self, g: TargetGeometry) -> None:
        super().__init__()
        assert g.gated_delta is not None
        delta = g.gated_delta
        self.key_heads = delta.key_heads
        self.in_proj = nn.Linear(g.hidden, delta.row_width, bias=False)
        self.in_proj_z = nn.Linear(g.hidden, delta.values, bias=False)
        self.conv1d = nn.Conv1d(delta.channels, delta.channels, delta.taps, groups=delta.channels)
        self.conv1d.bias = None
        self.decay_scale = nn.Parameter(torch.empty(delta.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(delta.value_heads))
        self.norm = LlamaNorm(delta.value_width, g.norm.eps)
        self.out_proj = nn.Linear(delta.values, g.hidden, bias=False)

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: StatePools,
        view: StateView,
        launch: Launch,  # noqa: ARG002 - a state has no positions
        tables: Any,  # noqa: ARG002
        blocks: None = None,
        index: None = None,
    ) -> tuple[torch.Tensor, WrittenStates, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """``x`` [T, H], normed → [T, H], the written state and the rows' inputs of the state."""
        assert blocks is None and index is None
        inputs, gate = self.in_proj(x), self.in_proj_z(x)
        mixed, tail, state = torch_op("GatedDelta")(
            inputs,
            self.conv1d.weight,
            self.decay_scale.float(),
            self.dt_bias.float(),
            *view,
            *pools,
            key_heads=self.key_heads,
        )
        normed = self.norm(mixed).float() * F.silu(gate.view(mixed.shape).float())
        output = self.out_proj(normed.to(x.dtype).flatten(1))
        return output, WrittenStates(tail, state, inputs), (), ()


def key_heads(g: TargetGeometry) -> int:
    """Return the attribute ``key_heads`` of the op for a target with linear attention."""
    assert g.gated_delta is not None
    return g.gated_delta.key_heads


def recurrence_ports(
    g: TargetGeometry, layer: int, activations: torch.dtype
) -> tuple[InputPort, ...]:
    """Return the ports of a layer's convolution and gate weights, as the op reads them."""
    delta = g.gated_delta
    assert delta is not None
    prefix = f"model.layers.{layer}.{NAME}."
    return (
        InputPort(f"{prefix}conv1d.weight", activations, (delta.channels, 1, delta.taps)),
        InputPort(f"{prefix}decay_scale", torch.float32, (delta.value_heads,)),
        InputPort(f"{prefix}dt_bias", torch.float32, (delta.value_heads,)),
    )


def delta_shapes(hidden: int, delta: GatedDelta) -> Shapes:
    """Return the shapes of a layer's tensors in Qwen3.5 checkpoints, by names within it."""
    heads = delta.value_heads
    return {
        "in_proj_qkv.weight": (delta.channels, hidden),
        "in_proj_z.weight": (delta.values, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (delta.channels, 1, delta.taps),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (delta.value_width,),
        "out_proj.weight": (hidden, delta.values),
    }


def delta_for_engine(tensors: Tensors, layer: int) -> Tensors:
    """Remove the tensors that engines have in another form, and return their new forms.

    One projection computes all inputs of the state. The decay's factor is −exp(A_log), in fp32.
    """
    prefix = f"model.layers.{layer}.{NAME}."
    parts = [tensors.pop(f"{prefix}in_proj_{part}.weight") for part in ("qkv", "b", "a")]
    converted = {f"{prefix}in_proj.weight": _joined_rows(f"{prefix}in_proj.weight", parts)}
    for name, source, convert in (
        ("decay_scale", tensors.pop(f"{prefix}A_log"), lambda log: -log.float().exp()),
        ("dt_bias", tensors[f"{prefix}dt_bias"], torch.Tensor.float),
    ):
        converted[f"{prefix}{name}"] = remade(f"{prefix}{name}", source, convert, dtype="F32")
    return converted


def _joined_rows(name: str, parts: Sequence[SourceTensor]) -> SourceTensor:
    """Concatenate the rows of all parts; parts with different dtypes become fp32."""
    dtypes = {part.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"

    def load() -> torch.Tensor:
        return torch.cat([part.load().to(TORCH_DTYPES[dtype]) for part in parts])

    return SourceTensor(
        name=name,
        dtype=dtype,
        shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
        sources=tuple(source for part in parts for source in part.sources),
        load=load,
        file=None,
        offset=None,
    )
