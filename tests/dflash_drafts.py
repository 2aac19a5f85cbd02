"""Write random DFlash drafts, and compute their proposals in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write_json, write_shards
from random_weights import Tensors

MASK_TOKEN, BLOCK = 5, 6
HEADS, KV_HEADS, WIDTH, EPS, THETA = 4, 2, 32, 1e-5, 10000.0
AUX_LAYERS = (0, 2, 3)


def write_dflash(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    inner: int = 96,
    vocab: int = 256,
    causal: bool = False,
    normed: bool = True,
    dtype: torch.dtype = torch.float32,
    config_changes: dict[str, Any] | None = None,
) -> Tensors:
    """Write a random draft of :data:`AUX_LAYERS`. None in ``config_changes`` removes a key."""
    random = torch.Generator().manual_seed(11)
    tensors: Tensors = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = torch.randn(rows, columns, generator=random) / math.sqrt(columns)
        tensors[f"{name}.weight"] = values.to(dtype)

    def norm(name: str, width: int) -> None:
        values = 1 + 0.2 * torch.randn(width, generator=random)
        tensors[f"{name}.weight"] = values.to(dtype)

    matrix("fc", hidden, len(AUX_LAYERS) * hidden)
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for layer in (f"layers.{i}" for i in range(layers)):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{layer}.self_attn.{part}_proj", heads * WIDTH, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, HEADS * WIDTH)
        for part in "qk" if normed else "":
            norm(f"{layer}.self_attn.{part}_norm", WIDTH)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden)
        matrix(f"{layer}.mlp.up_proj", inner, hidden)
        matrix(f"{layer}.mlp.down_proj", hidden, inner)
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
    own: dict[str, Any] = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(AUX_LAYERS)}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK,
        "dflash_config": own | ({"causal_head": True} if causal else {}),
        "attention_bias": False,
        "head_dim": WIDTH,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 512,
        "model_type": "qwen3" if normed else "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": 4,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": vocab,
    } | (config_changes or {})
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", {k: v for k, v in config.items() if v is not None})
    write_shards(path, tensors, 1)
    return tensors


class PlainDFlash:
    """Section 3 of arXiv 2602.06036 without caches, one query at a time.

    ``embedding`` and ``head`` [V, H] are the target's. A row attends to ``window`` positions,
    including its own. Row ``first`` of a block drafts level 1.
    """

    def __init__(
        self,
        tensors: Tensors,
        embedding: torch.Tensor,
        head: torch.Tensor,
        window: int = 1 << 30,
        first: int = 1,
    ) -> None:
        self.window, self.first = window, first
        self.of = {name: value.float() for name, value in tensors.items()}
        self.embedding, self.head = embedding.float(), head.float()
        found = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        self.layers = [f"layers.{i}" for i in range(len(found))]

    def logits(self, states: torch.Tensor, root: int, *, causal: bool) -> torch.Tensor:
        """Return the logits [BLOCK − first, V] of the levels after ``root``.

        ``root`` follows the tokens with the states [L, n·H].
        """
        context = self.normed(states @ self.of["fc.weight"].T, "hidden_norm")
        x = self.embedding[torch.tensor([root] + [MASK_TOKEN] * (BLOCK - 1))]
        for layer in self.layers:
            x = x + self.attended(
                layer, self.normed(x, f"{layer}.input_layernorm"), context, causal=causal
            )
            y = self.normed(x, f"{layer}.post_attention_layernorm")
            gate = torch.nn.functional.silu(y @ self.of[f"{layer}.mlp.gate_proj.weight"].T)
            up = y @ self.of[f"{layer}.mlp.up_proj.weight"].T
            x = x + (gate * up) @ self.of[f"{layer}.mlp.down_proj.weight"].T
        return self.normed(x, "norm")[self.first :] @ self.head.T

    def attended(
        self, layer: str, block: torch.Tensor, context: torch.Tensor, *, causal: bool
    ) -> torch.Tensor:
        """Attend with every row of the block to the context and the block's visible rows."""
        start, rows = len(context), torch.cat([context, block])
        q = self.heads(layer, "q", block, start)
        k, v = self.heads(layer, "k", rows, 0), self.heads(layer, "v", rows, 0)
        out = torch.zeros(len(block), HEADS, WIDTH)
        for row in range(len(block)):
            first = max(0, start + row + 1 - self.window)
            seen = slice(first, start + row + 1 if causal else len(rows))
            for head in range(HEADS):
                source = head * KV_HEADS // HEADS
                weights = (k[seen, source] @ q[row, head] / math.sqrt(WIDTH)).softmax(dim=0)
                out[row, head] = weights @ v[seen, source]
        return out.flatten(1) @ self.of[f"{layer}.self_attn.o_proj.weight"].T

    def heads(self, layer: str, part: str, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return [T, heads, WIDTH].

        Queries and keys are normed and rotated. The first row is at position ``first``.
        """
        y = (x @ self.of[f"{layer}.self_attn.{part}_proj.weight"].T).view(len(x), -1, WIDTH)
        if part == "v":
            return y
        if f"{layer}.self_attn.{part}_norm.weight" in self.of:
            y = self.normed(y, f"{layer}.self_attn.{part}_norm")
        half = WIDTH // 2
        at = torch.arange(first, first + len(x))
        turns = torch.outer(at, THETA ** (-torch.arange(half) / half))[:, None]
        pairs = torch.complex(y[..., :half], y[..., half:])
        turned = pairs * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm over the last axis."""
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)
        return x * scale * self.of[f"{name}.weight"]
