"""One GPT-OSS layer in plain fp32 PyTorch on whole sequences, for retrofits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from specbuild.builder.families.family import Projection
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.plugins_cuda.mla_attention.op import rotated
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.moe.op import clamped_swiglu, route
from specbuild.plugins_cuda.paged_tree_attention.op import visibility
from specbuild.runtime.engine_dir.feed_forward import ClampedSwiglu
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class StreamedLayer:
    """One layer; the names of ``weights`` lack the prefix ``model.layers.N.``."""

    def __init__(
        self, geometry: TargetGeometry, weights: Mapping[str, torch.Tensor], window: int
    ) -> None:
        self._g, self._weights, self._window = geometry, weights, window

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return attention's input for the hidden states ``x`` [N, T, H]."""
        return self._norm("input_layernorm", x)

    def keys_values(self, normed: torch.Tensor) -> torch.Tensor:
        """Compute keys and values with the checkpoint's weights; a :data:`Projection`."""
        names = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
        return normed @ torch.cat([self._float(name) for name in names]).T

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, keys_values: Projection
    ) -> torch.Tensor:
        """Return the layer's output [N, T, H]; ``normed`` is :meth:`normed` of ``x``."""
        attended = torch.stack([self._attention(row, keys_values) for row in normed])
        x = x + attended
        rows = self._norm("post_attention_layernorm", x)
        return x + self._experts(rows.flatten(0, 1)).view_as(x)

    def _float(self, name: str) -> torch.Tensor:
        return self._weights[name].float()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._float(f"{name}.weight")
        return F.rms_norm(x, weight.shape, weight, self._g.norm.eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._float(f"{name}.weight"), self._float(f"{name}.bias"))

    def _attention(self, x: torch.Tensor, keys_values: Projection) -> torch.Tensor:
        """Map one sequence ``x`` [T, H], normed, to [T, H]."""
        g, count = self._g, len(x)
        positions = torch.arange(count)
        cos, sin = rope_tables(g.rope, g.head_dim, count)
        biases = [self._float(f"self_attn.{part}_proj.bias") for part in "kv"]
        both = keys_values(x) + torch.cat(biases)
        k, v = (part.unflatten(1, (g.kv_heads, -1)) for part in both.chunk(2, dim=1))
        q = self._linear("self_attn.q_proj", x).unflatten(1, (g.q_heads, -1))
        q, k = (rotated(part, cos, sin, positions) for part in (q, k))
        queries = q.unflatten(1, (g.kv_heads, -1))
        scores = torch.einsum("thgd,shd->hgts", queries, k) * g.head_dim**-0.5
        visible = visibility(positions, count, torch.zeros(count, 1).int(), count, self._window)
        scores = scores.masked_fill(~visible, -torch.inf)
        sinks = self._float("self_attn.sinks").view(g.kv_heads, -1, 1, 1)
        joined = torch.cat([scores, sinks.expand(-1, -1, count, 1)], dim=-1)
        weights = joined.softmax(dim=-1)[..., :count]
        attended = torch.einsum("hgts,shd->thgd", weights, v).flatten(1)
        return self._linear("self_attn.o_proj", attended)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [R, H], normed, to [R, H]; every expert computes the rows that chose it."""
        moe = self._g.moe
        assert moe is not None and isinstance(moe.activation, ClampedSwiglu)
        alpha, limit = moe.activation.alpha, moe.activation.limit
        logits = self._linear("mlp.router", x)
        shares = route(logits, moe.experts_per_token, "softmax_selected")
        gate_up, down = (self._expert_weights(name) for name in ("gate_up_proj", "down_proj"))
        out = torch.zeros_like(x)
        for expert in range(moe.experts):
            rows = shares[:, expert].nonzero().squeeze(1)
            if len(rows):
                y = x[rows] @ gate_up[0][expert] + gate_up[1][expert]
                y = clamped_swiglu(y, alpha, limit)
                z = y @ down[0][expert] + down[1][expert]
                out.index_add_(0, rows, shares[rows, expert].unsqueeze(1) * z)
        return out

    def _expert_weights(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all experts' matrices [E, in, out] and biases [E, out] in fp32."""
        prefix = f"mlp.experts.{name}"
        scales = self._weights.get(f"{prefix}_scales")
        weight = self._weights[prefix if scales is None else f"{prefix}_blocks"]
        return expert_weight(weight, scales), self._float(f"{prefix}_bias")
