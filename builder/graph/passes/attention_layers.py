"""The projections, rotations and cache writes around an attention, as the export leaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import producer

# The value before what a lowering does not count as a step of its own (reshapes, casts).
Through: TypeAlias = Callable[[ir.Value | None], ir.Value | None]


@dataclass(frozen=True)
class Rotated:
    """A projection and its rotation."""

    gemm: ir.Node
    rotary: ir.Node


@dataclass(frozen=True)
class AttentionLayer:
    """The nodes around one ``PagedTreeAttention``."""

    attention: ir.Node
    k_write: ir.Node
    v_write: ir.Node
    q: Rotated
    k: Rotated
    v_gemm: ir.Node

    @property
    def gemms(self) -> tuple[ir.Node, ir.Node, ir.Node]:
        """The projections to Q, K and V."""
        return self.q.gemm, self.k.gemm, self.v_gemm


def attention_layer(attention: ir.Node, through: Through) -> AttentionLayer | None:
    """What stands in front of an attention; None where it is not Gemms, rotations and writes."""
    k_write = producer(attention.inputs[1], "KvWrite")
    v_write = producer(attention.inputs[2], "KvWrite")
    if k_write is None or v_write is None:
        return None
    q = rotated_projection(attention.inputs[0], through)
    k = rotated_projection(k_write.inputs[1], through)
    v_gemm = producer(through(v_write.inputs[1]), "Gemm")
    if q is None or k is None or v_gemm is None:
        return None
    return AttentionLayer(attention, k_write, v_write, q, k, v_gemm)


def rotated_projection(value: ir.Value | None, through: Through) -> Rotated | None:
    """The projection and the rotation that make ``value``; None where it is none."""
    rotary = producer(through(value), "RotaryEmbedding")
    gemm = None if rotary is None else producer(through(rotary.inputs[0]), "Gemm")
    return None if rotary is None or gemm is None else Rotated(gemm, rotary)
