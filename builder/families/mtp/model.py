"""An MTP layer (arXiv 2412.19437, section 2.2) as a recurrent draft.

``u = W [enorm(embedding of t + 1); hnorm(h_t)]``, ``y = block(u)``, the next h is
``shared_head.norm(y)``, and the head predicts token t + 2 from it. The first h is the target's
state after its final norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specbuild.builder.families.mtp.block import block_parts
from specbuild.builder.families.parts.draft_modules import NormHolder, TargetEmbedding
from specbuild.builder.families.parts.graph_io import GroupView, LatentPool, Launch, LayerPools
from specbuild.builder.families.parts.llama import norm_module
from specbuild.builder.families.parts.target import Block
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


class MtpLayer(Block):
    """The layer with the names of its checkpoint; engines store it with the prefix ``draft.``."""

    def __init__(self, d: MtpGeometry, target: TargetGeometry) -> None:
        super().__init__(*block_parts(d, target))
        self.enorm, self.hnorm = (norm_module(target.norm, d.hidden) for _ in range(2))
        self.eh_proj = nn.Linear(2 * d.hidden, d.hidden, bias=False)
        self.shared_head = NormHolder(target)


class Mtp(nn.Module):
    """The role ``draft``: one level of drafting, or the extension over accepted tokens."""

    def __init__(self, d: MtpGeometry, target: TargetGeometry, max_positions: int) -> None:
        super().__init__()
        self.draft, self.model = MtpLayer(d, target), TargetEmbedding(target)
        self.lm_head = nn.Linear(target.hidden, target.vocab, bias=False)
        table = torch.empty(max_positions, d.rotated // 2)
        self.register_buffer("draft_rope_cos", table)
        self.register_buffer("draft_rope_sin", table.clone())

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        launch: Launch,
        view: GroupView,
        pools: tuple[LatentPool | LayerPools],
    ) -> tuple[Any, ...]:
        """Row t pairs ``hidden`` [T, H] with the next token's embedding, at the hidden's position.

        Returns draft_logits [R, V] fp32, hidden_out [T, H] (the recurrence), the written pool, and
        the stages attention, ffn, pre_head.
        """
        layer = self.draft
        embedded = layer.enorm(self.model.embed_tokens(token_ids))
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden)], dim=-1))
        tables = (self.draft_rope_cos, self.draft_rope_sin)
        attention, written, *_ = layer.self_attn(
            layer.input_layernorm(x), pools[0], view, launch, tables
        )
        x = x + attention
        ffn = layer.mlp(layer.post_attention_layernorm(x))
        recurrence = layer.shared_head.norm(x + ffn)
        pre_head = recurrence.index_select(0, launch.logit_rows)
        logits = self.lm_head(pre_head).float()
        return logits, recurrence, written, attention, ffn, pre_head
