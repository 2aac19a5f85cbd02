"""Finds the projections, RoPE and cache writes of an attention in exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from specbuild.builder.graph.passes.rewriting import producer

# Return the value before nodes that do not count as steps (reshapes, casts).
Through: TypeAlias = Callable[[ir.Value | None], ir.Value | None]


@dataclass(frozen=True)
class Rotated:
    """A projection and its RoPE, and the optional norm of heads between them."""

    gemm: ir.Node
    rotary: ir.Node
    norm: ir.Node | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """The nodes around one ``PagedTreeAttention``."""

    attention: ir.Node
    k_write: ir.Node
    v_write: ir.Node
    q: Rotated
    k: Rotated
    v_gemm: ir.Node
    v_norm: ir.Node | None = None

    @property
    def gemms(self) -> tuple[ir.Node, ir.Node, ir.Node]:
        """The projections to Q, K and V."""
        return self.q.gemm, self.k.gemm, self.v_gemm


def attention_layer(
    attention: ir.Node, through: Through, *, head_norms: bool = False
) -> AttentionLayer | None:
    """Return the nodes before an attention; None if they are not Gemms, RoPE and writes.

    With ``head_norms`` a norm may be between a projection and its RoPE, and one may norm values.
    """
    k_write = producer(attention.inputs[1], "KvWrite")
    v_write = producer(attention.inputs[2], "KvWrite")
    if k_write is None or v_write is None:
        return None
    q = rotated_projection(attention.inputs[0], through, head_norms=head_norms)
    k = rotated_projection(k_write.inputs[1], through, head_norms=head_norms)
    value = through(v_write.inputs[1])
    v_norm = producer(value, "RMSNormalization") if head_norms else None
    v_gemm = producer(value if v_norm is None else through(v_norm.inputs[0]), "Gemm")
    if q is None or k is None or v_gemm is None:
        return None
    return AttentionLayer(attention, k_write, v_write, q, k, v_gemm, v_norm)


def rotated_projection(
    value: ir.Value | None, through: Through, *, head_norms: bool = False
) -> Rotated | None:
    """Return the projection and RoPE that compute ``value``, or None."""
    rotary = producer(through(value), "RotaryEmbedding")
    if rotary is None:
        return None
    turned = through(rotary.inputs[0])
    norm = producer(turned, "RMSNormalization") if head_norms else None
    gemm = producer(turned if norm is None else through(norm.inputs[0]), "Gemm")
    return None if gemm is None else Rotated(gemm, rotary, norm)
