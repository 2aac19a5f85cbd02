"""DFlash's modules: one writes the target's states to the caches, one runs a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.attention import write_and_attend
from specbuild.builder.families.parts.draft_modules import TargetEmbedding
from specbuild.builder.families.parts.graph_io import GroupView, Launch, LayerPools
from specbuild.builder.families.parts.llama import LlamaNorm, SwigluMlp
from specbuild.builder.families.parts.rope import rotate
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class DFlashAttention(nn.Module):
    """Attention of one layer, which projects keys and values from block rows or target states."""

    def __init__(self, d: DFlashGeometry) -> None:
        super().__init__()
        self.geometry = d
        parts, q, kv = d.attention, d.q_heads * d.head_dim, d.kv_heads * d.head_dim
        self.q_proj = nn.Linear(d.hidden, q, bias=parts.qkv_bias)
        self.k_proj = nn.Linear(d.hidden, kv, bias=parts.qkv_bias)
        self.v_proj = nn.Linear(d.hidden, kv, bias=parts.qkv_bias)
        self.o_proj = nn.Linear(q, d.hidden, bias=parts.output_bias)
        if parts.qk_norm == "head":
            self.q_norm = LlamaNorm(d.head_dim, d.rms_eps)
            self.k_norm = LlamaNorm(d.head_dim, d.rms_eps)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor, tables: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, H] → rotated keys and values [T, kv_heads, D]."""
        d, k = self.geometry, self.k_proj(x)
        if d.attention.qk_norm == "head":
            k = self.k_norm(k.unflatten(1, (d.kv_heads, -1))).flatten(1)
        v = self.v_proj(x).view(-1, d.kv_heads, d.head_dim)
        return rotate(k, tables, positions, d.kv_heads), v

    def forward(
        self, x: torch.Tensor, pools: LayerPools, view: GroupView, launch: Launch, tables: Any
    ) -> tuple[torch.Tensor, LayerPools]:
        """``x`` [T, H] → [T, H] and the written pools."""
        d, q = self.geometry, self.q_proj(x)
        if d.attention.qk_norm == "head":
            q = self.q_norm(q.unflatten(1, (d.q_heads, -1))).flatten(1)
        q = rotate(q, tables, launch.positions, d.q_heads)
        k, v = self.keys_values(x, launch.positions, tables)
        attended, written = write_and_attend((q, k, v), pools, view, launch, None, d.sliding_window)
        return self.o_proj(attended), written


class DFlashLayer(nn.Module):
    """A block as in Qwen3, with the names of checkpoints."""

    def __init__(self, d: DFlashGeometry) -> None:
        super().__init__()
        self.input_layernorm = LlamaNorm(d.hidden, d.rms_eps)
        self.self_attn = DFlashAttention(d)
        self.post_attention_layernorm = LlamaNorm(d.hidden, d.rms_eps)
        self.mlp = SwigluMlp(d.hidden, d.inner)


class DFlashWeights(nn.Module):
    """All tensors of a checkpoint; engines store them with the prefix ``draft.``."""

    def __init__(self, d: DFlashGeometry, target: TargetGeometry) -> None:
        super().__init__()
        self.fc = nn.Linear(len(d.aux_layers) * target.hidden, d.hidden, bias=False)
        self.hidden_norm = LlamaNorm(d.hidden, d.rms_eps)
        self.layers = nn.ModuleList(DFlashLayer(d) for _ in range(d.layers))
        self.norm = LlamaNorm(d.hidden, d.rms_eps)


class _RotaryModule(nn.Module):
    """A module with the draft's weights and rotary tables."""

    def __init__(self, d: DFlashGeometry, target: TargetGeometry, max_positions: int) -> None:
        super().__init__()
        self.draft = DFlashWeights(d, target)
        table = torch.empty(max_positions, d.head_dim // 2)
        self.register_buffer("draft_rope_cos", table)
        self.register_buffer("draft_rope_sin", table.clone())

    @property
    def tables(self) -> Any:
        """Cosines and sines."""
        return self.draft_rope_cos, self.draft_rope_sin


class DFlashContext(_RotaryModule):
    """The role ``draft_fuse``: writes each layer's keys and values of the target's states."""

    def forward(
        self,
        aux_hidden: torch.Tensor,
        positions: torch.Tensor,
        write_slot: torch.Tensor,
        pools: tuple[LayerPools, ...],
    ) -> tuple[Any, ...]:
        """``aux_hidden`` [T, aux_layers·Ht] of tokens at ``positions`` [T] → the written pools."""
        states = self.draft.hidden_norm(self.draft.fc(aux_hidden))
        write, written = torch_op("KvWrite"), []
        layers: Any = self.draft.layers
        for layer, pool in zip(layers, pools, strict=True):
            k, v = layer.self_attn.keys_values(states, positions, self.tables)
            written.append(LayerPools(write(pool.k, k, write_slot), write(pool.v, v, write_slot)))
        return tuple(written)


class DFlash(_RotaryModule):
    """The role ``draft``: one pass over blocks of a token and mask tokens."""

    def __init__(self, d: DFlashGeometry, target: TargetGeometry, max_positions: int) -> None:
        super().__init__(d, target, max_positions)
        self.model = TargetEmbedding(target)
        self.lm_head = nn.Linear(target.hidden, target.vocab, bias=False)

    def forward(
        self,
        token_ids: torch.Tensor,
        launch: Launch,
        view: GroupView,
        pools: tuple[LayerPools, ...],
    ) -> tuple[Any, ...]:
        """Run rows of blocks, whose visibility is in the launch's ancestor bits.

        Returns draft_logits [R, V] fp32, the written pools, the last layer's stages attention and
        ffn, and pre_head.
        """
        x, written = self.model.embed_tokens(token_ids), []
        stages: tuple[Any, ...] = ()
        layers: Any = self.draft.layers
        for layer, pool in zip(layers, pools, strict=True):
            attention, pair = layer.self_attn(
                layer.input_layernorm(x), pool, view, launch, self.tables
            )
            x = x + attention
            ffn = layer.mlp(layer.post_attention_layernorm(x))
            x, stages = x + ffn, (attention, ffn)
            written.append(pair)
        pre_head = self.draft.norm(x).index_select(0, launch.logit_rows)
        logits = self.lm_head(pre_head).float()
        return logits, tuple(written), *stages, pre_head
