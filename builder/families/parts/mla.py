"""MLA with decoupled RoPE (DeepSeek-V2, arXiv 2405.04434), under Hugging Face's tensor names.

The cache entry of a token is ``[c | r]``: the normed latent c [kv_lora_rank], and a rotated key r
[rope_dim] that all heads share. Head h scores ``q_h · W_uk,h c + p_h · r`` and its value is
``W_uv,h c``. ``kv_b_proj`` is ``[W_uk,h; W_uv,h]``. Three forms are executable definitions here.
:meth:`MlaAttention.forward` is the absorbed form over a paged cache.

Queries are absorbed at run time. Absorbing W_uk into ``q_b_proj`` at build time would need
``rank + rope`` rows per head instead of ``nope + rope`` (2.5 times the bytes of both weights at
DeepSeek-V3's sizes), and its rounding would differ from the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specbuild.builder.families.parts.graph_io import GroupView, LatentPool, Launch
from specbuild.builder.families.parts.llama import LlamaNorm
from specbuild.builder.families.parts.rope import rotate
from specbuild.plugins_cuda.torch_ops import torch_op
from specbuild.runtime.engine_dir.geometry import MlaGeometry

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of attention for the rows of one sequence.

    ``q_nope`` [T, h, nope], rotated ``q_rope`` [T, h, rope], cache ``entries`` [S, rank + rope],
    ``w_uk`` [h, nope, rank], ``w_uv`` [h, v, rank], ``seen`` bool [T, S], ``sinks`` [h] or None.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    entries: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    seen: torch.Tensor
    scale: float
    sinks: torch.Tensor | None = None

    @property
    def latents(self) -> torch.Tensor:
        """The latents c of all tokens, [S, rank]."""
        return self.entries[:, : self.w_uk.shape[2]]

    @property
    def shared_keys(self) -> torch.Tensor:
        """The shared keys r of all tokens, [S, rope]."""
        return self.entries[:, self.w_uk.shape[2] :]

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the softmax of ``scores`` [h, T, S] over visible tokens and the head's sink."""
        scores = (scores * self.scale).masked_fill(~self.seen, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        return scores.softmax(dim=-1)[..., : self.entries.shape[0]]


def naive(inputs: AttentionInputs) -> torch.Tensor:
    """Expand keys and values of every head, as without a latent cache → [T, h, v]."""
    k_nope = torch.einsum("sr,hnr->shn", inputs.latents, inputs.w_uk)
    shared = inputs.shared_keys.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
    k = torch.cat([k_nope, shared], dim=-1)
    v = torch.einsum("sr,hvr->shv", inputs.latents, inputs.w_uv)
    q = torch.cat([inputs.q_nope, inputs.q_rope], dim=-1)
    weights = inputs.weights(torch.einsum("thd,shd->hts", q, k))
    return torch.einsum("hts,shv->thv", weights, v)


def absorbed(inputs: AttentionInputs) -> torch.Tensor:
    """Absorb W_uk into the query: all heads share one key, the entry, and one value."""
    q = torch.cat([absorbed_query(inputs.q_nope, inputs.w_uk), inputs.q_rope], dim=-1)
    weights = inputs.weights(torch.einsum("thd,sd->hts", q, inputs.entries))
    mixed = torch.einsum("hts,sr->thr", weights, inputs.latents)
    return torch.einsum("thr,hvr->thv", mixed, inputs.w_uv)


def split_scores(inputs: AttentionInputs) -> torch.Tensor:
    """Add the scores of the parts without and with rotation, which are never concatenated."""
    nope = torch.einsum("thr,sr->hts", absorbed_query(inputs.q_nope, inputs.w_uk), inputs.latents)
    rope = torch.einsum("thp,sp->hts", inputs.q_rope, inputs.shared_keys)
    mixed = torch.einsum("hts,sr->thr", inputs.weights(nope + rope), inputs.latents)
    return torch.einsum("thr,hvr->thv", mixed, inputs.w_uv)


FORMS: dict[str, Callable[[AttentionInputs], torch.Tensor]] = {
    "naive": naive,
    "absorbed": absorbed,
    "split scores": split_scores,
}


def absorbed_query(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Project ``q_nope`` [T, h, nope] to the space of latents, [T, h, rank]."""
    return (q_nope.transpose(0, 1) @ w_uk).transpose(0, 1)


class MlaAttention(nn.Module):
    """One layer's attention; parameter names are those of DeepSeek checkpoints.

    In ``interleaved`` weights rotated pairs are adjacent, in others half a head apart. ``inputs``
    is the width of its input; None is ``hidden``.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        g: MlaGeometry,
        *,
        interleaved: bool,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        inputs = inputs or hidden
        self.heads, self.geometry, self.interleaved = heads, g, interleaved
        q_width = heads * (g.nope_dim + g.rope_dim)
        if g.q_lora_rank is None:
            self.q_proj = nn.Linear(inputs, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(inputs, g.q_lora_rank, bias=False)
            self.q_a_layernorm = LlamaNorm(g.q_lora_rank, g.norm.eps)
            self.q_b_proj = nn.Linear(g.q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs, g.entry_width, bias=False)
        self.kv_a_layernorm = LlamaNorm(g.kv_lora_rank, g.norm.eps)
        self.kv_b_proj: Any = self.make_up_projections()
        self.o_proj = nn.Linear(heads * g.v_dim, hidden, bias=False)

    def make_up_projections(self) -> nn.Module:
        """Return the module ``kv_b_proj``."""
        g = self.geometry
        return nn.Linear(g.kv_lora_rank, self.heads * (g.nope_dim + g.v_dim), bias=False)

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``W_uk`` [h, nope, rank] and ``W_uv`` [h, v, rank]."""
        g = self.geometry
        both = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        w_uk, w_uv = both.split([g.nope_dim, g.v_dim], dim=1)
        return w_uk, w_uv

    def queries(
        self, x: torch.Tensor, tables: Tables, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, H] → parts without rotation [T, h, nope] and with it [T, h, rope]."""
        g = self.geometry
        if g.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(-1, self.heads, g.nope_dim + g.rope_dim)
        nope, rope = q.split([g.nope_dim, g.rope_dim], dim=-1)
        return nope, self._rotated(rope, tables, positions)

    def entries(self, x: torch.Tensor, tables: Tables, positions: torch.Tensor) -> torch.Tensor:
        """Return the cache entries of ``x`` [T, H]: [T, rank + rope]."""
        g = self.geometry
        latent, rope = self.kv_a_proj_with_mqa(x).split([g.kv_lora_rank, g.rope_dim], dim=-1)
        shared = self._rotated(rope.unsqueeze(1), tables, positions).squeeze(1)
        return torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)

    def forward(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        pools: LatentPool,
        view: GroupView,
        launch: Launch,
        tables: Tables,
        blocks: None = None,  # noqa: ARG002  SpecPV and DSA need keys, which this cache lacks
        index: None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, LatentPool, tuple[()], tuple[()]]:
        """``x`` [T, H], normed → [T, H] and the written pool, ``entry_width`` values per slot."""
        entries = self.entries(x, tables, launch.positions).unsqueeze(1)
        written = LatentPool(torch_op("KvWrite")(pools.c, entries, view.write_slot))
        q_nope, q_rope = self.queries(x, tables, launch.positions)
        w_uk, w_uv = self.up_projections()
        q = torch.cat([absorbed_query(q_nope, w_uk), q_rope], dim=-1)
        attended = torch_op("MlaAttention")(
            q, written.c, None, None, w_uv.permute(2, 0, 1), None, None, None,
            view.page_table[0], launch.row_start, view.row_slot, view.tree_start,
            launch.ancestor_bits, None, None, None,
            scale=self.geometry.scale, window=0,
        )  # fmt: skip
        return self.o_proj(attended.flatten(1)), written, (), ()

    def _rotated(self, x: torch.Tensor, tables: Tables, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` [T, heads, rope]; interleaved pairs become half-split."""
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return rotate(x.flatten(1), tables, positions, x.shape[1])


class SplitUpProjections(nn.Module):
    """``kv_b_proj`` as two parameters per head: W_uk and W_uv."""

    def __init__(self, heads: int, g: MlaGeometry) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(heads, g.nope_dim, g.kv_lora_rank))
        self.value = nn.Parameter(torch.empty(heads, g.v_dim, g.kv_lora_rank))


class EngineMlaAttention(MlaAttention):
    """The layer with an engine's weights: ``kv_b_proj`` split, rotated pairs half-split."""

    def __init__(self, hidden: int, heads: int, g: MlaGeometry, inputs: int | None = None) -> None:
        super().__init__(hidden, heads, g, interleaved=False, inputs=inputs)

    def make_up_projections(self) -> nn.Module:
        """Return the module ``kv_b_proj``."""
        return SplitUpProjections(self.heads, self.geometry)

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``W_uk`` [h, nope, rank] and ``W_uv`` [h, v, rank]."""
        return self.kv_b_proj.key, self.kv_b_proj.value
