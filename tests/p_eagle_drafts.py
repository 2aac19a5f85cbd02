"""Write random P-EAGLE drafts, and compute their proposals in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import edit_config, edit_tensors
from checkpoints import write_draft
from random_weights import Tensors

MASK_TOKEN = 5


def write_p_eagle(
    path: Path, *, spelling: str = "pard_token", aux_layers: int = 3, **options: Any
) -> Tensors:
    """Write a random draft of ``write_draft``'s ``options``; return its canonical tensors."""
    tensors = write_draft(path, **options)
    width = aux_layers * options.get("target_hidden", 64)
    mask = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(77))
    tensors["mask_hidden"] = mask.to(tensors["fc.weight"].dtype)
    edit_tensors(path, lambda stored: stored.update(mask_hidden=tensors["mask_hidden"]))
    edit_config(path, **{spelling: MASK_TOKEN})
    return tensors


class PlainPEagle:
    """Section 3 of arXiv 2602.01469 without caches: LLaMA layers of 4 query and 2 KV heads of 32.

    RoPE has theta 10000. ``embedding`` [V, H] is the target's.
    """

    heads, kv_heads, width, eps = 4, 2, 32, 1e-5

    def __init__(self, tensors: Tensors, embedding: torch.Tensor) -> None:
        self.of = {name: value.float() for name, value in tensors.items()}
        self.embedding = embedding.float()
        found = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        self.layers = ["midlayer", *[f"layers.{1 + i}" for i in range(len(found))]]

    def logits(self, states: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the logits [depth, Vd] of the positions after ``ids`` [L + 1].

        The first L tokens have the target's states [L, n·Ht].
        """
        count = len(states)
        masks = self.of["mask_hidden"].reshape(1, -1).expand(depth - 1, -1)
        hidden = self.fused(torch.cat([states, masks]))
        tokens = torch.cat([ids[1:], torch.full((depth - 1,), MASK_TOKEN)])
        embedded = self.normed(self.embedding[tokens], "midlayer.input_layernorm")
        x = torch.cat([embedded, self.normed(hidden, "midlayer.hidden_norm")], dim=1)
        for layer in self.layers:
            if layer != "midlayer":
                x = self.normed(hidden, f"{layer}.input_layernorm")
            hidden = hidden + self.attended(layer, x)
            y = self.normed(hidden, f"{layer}.post_attention_layernorm")
            up = self.of[f"{layer}.mlp.up_proj.weight"] @ y.T
            gate = torch.nn.functional.silu(self.of[f"{layer}.mlp.gate_proj.weight"] @ y.T)
            hidden = hidden + (self.of[f"{layer}.mlp.down_proj.weight"] @ (gate * up)).T
        return self.normed(hidden[count - 1 :], "norm") @ self.of["lm_head.weight"].T

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [T, n·Ht], or masks in their place, to [T, H]."""
        if "fc_norm.0.weight" in self.of:
            parts = states.chunk(3, dim=1)
            states = torch.cat([self.normed(p, f"fc_norm.{i}") for i, p in enumerate(parts)], dim=1)
        if "input_norm.weight" in self.of:
            states = self.normed(states, "input_norm")
        return states @ self.of["fc.weight"].T

    def attended(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return causal attention of rows at positions 0, 1, …"""
        projected = {
            part: (x @ self.of[f"{layer}.self_attn.{part}_proj.weight"].T).view(
                len(x), -1, self.width
            )
            for part in "qkv"
        }
        out = torch.zeros(len(x), self.heads, self.width)
        for head in range(self.heads):
            source = head * self.kv_heads // self.heads
            q, k = (self.turned(projected[p][:, h]) for p, h in (("q", head), ("k", source)))
            for row in range(len(x)):
                weights = (k[: row + 1] @ q[row] / math.sqrt(self.width)).softmax(dim=0)
                out[row, head] = weights @ projected["v"][: row + 1, source]
        return out.flatten(1) @ self.of[f"{layer}.self_attn.o_proj.weight"].T

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to rows [T, D], half-split, by complex numbers."""
        half = self.width // 2
        turns = torch.outer(torch.arange(len(x)), 10000.0 ** (-torch.arange(half) / half))
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=1)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Apply RMSNorm to rows."""
        scale = torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + self.eps)
        return x * scale * self.of[f"{name}.weight"]
