"""A DFlash draft in plain torch, fp32, without caches: Qwen3 layers over states and a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import open_directory, read_config
from specbuild.builder.families.dflash.config import read_dflash_config
from specbuild.builder.families.parts.path_draft import BlockDraft
from specbuild.builder.families.parts.reference_rope import rotary_frequencies
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.errors import SpecbuildError


class ReferenceDFlash(BlockDraft):
    """A checkpoint; ``embedding`` and ``head`` [V, H] are the target's."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, torch.Tensor],
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        block = read_dflash_config(Config("config.json", "draft", config), strict=False)
        decoder = block.decoder.fields
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.embedding, self.head = embedding.float(), head.float()
        self.block_size, self.mask_token = block.block_size, block.mask_token
        self.causal, self.first_row = block.causal, 0 if block.from_anchor else 1
        self.eps = decoder.get("rms_norm_eps", 1e-6)
        heads = decoder["num_attention_heads"]
        self.width = decoder.get("head_dim") or decoder["hidden_size"] // heads
        self.layers = decoder["num_hidden_layers"]
        self.window: int | None = None
        self.frequencies, self.attention_factor = rotary_frequencies(decoder, self.width)

    def logits(self, aux_hidden: torch.Tensor, root: int) -> torch.Tensor:
        """See :class:`BlockDraft`."""
        context = self._norm(aux_hidden @ self.weights["fc.weight"].T, "hidden_norm")
        block = torch.tensor([root, *[self.mask_token] * (self.block_size - 1)])
        x = self.embedding[block]
        for layer in (f"layers.{index}" for index in range(self.layers)):
            normed = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attention(f"{layer}.self_attn", normed, context)
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(y, f"{layer}.mlp.gate_proj"))
            up = self._linear(y, f"{layer}.mlp.up_proj")
            x = x + self._linear(gate * up, f"{layer}.mlp.down_proj")
        return self._norm(x[self.first_row :], "norm") @ self.head.T

    def _attention(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rows, start = torch.cat([context, x]), len(context)
        positions = torch.arange(len(rows))
        q = self._rotated(self._heads(x, f"{name}.q"), positions[start:])
        k = self._rotated(self._heads(rows, f"{name}.k"), positions)
        v = self._linear(rows, f"{name}.v_proj").unflatten(-1, (-1, self.width))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        distance = positions[start:, None] - positions
        hidden = (distance < 0) if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.width**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = self._linear(x, f"{name}_proj").unflatten(-1, (-1, self.width))
        return self._norm(y, f"{name}_norm") if f"{name}_norm.weight" in self.weights else y

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None, None] * self.frequencies
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def read_reference(path: Path, target: Any, built: DFlashGeometry, engine: Path) -> ReferenceDFlash:
    """See :class:`ReferenceReader`."""
    try:
        draft = ReferenceDFlash(
            read_config(path),
            {name: tensor.load() for name, tensor in open_directory(path).items()},
            embedding=target.model.embed_tokens.weight,
            head=target.lm_head.weight,
        )
    except KeyError as error:
        raise SpecbuildError(f"{path}: the draft lacks {error}; give a DFlash draft") from error
    if (draft.layers, draft.block_size) != (built.layers, built.block_size):
        raise SpecbuildError(
            f"{engine}: its draft has {built.layers} layers and blocks of {built.block_size}, but "
            f"{path} has {draft.layers} and {draft.block_size}; use the draft of the build"
        )
    # The engine's window can differ from the checkpoint's: it is an option of the build.
    draft.window = built.sliding_window or None
    return draft
