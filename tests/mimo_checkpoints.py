"""Write small random MiMos with an MTP layer, and compute that layer in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_files import Tensors, edit_config, edit_tensors
from llama_checkpoints import SIZES, write_llama

LAYER = "model.mtp_layers.0."


def write_mimo(path: Path, *, seed: int = 9, **changes: Any) -> Tensors:
    """Write a random MiMo of ``changes``, a Qwen2 with an MTP layer; return its tensors."""
    write_llama(path, "qwen2", **changes)
    edit_config(
        path, model_type="mimo", architectures=["MiMoForCausalLM"], attention_bias=True,
        num_nextn_predict_layers=1, use_mrope=False,
    )  # fmt: skip
    layers = (SIZES | changes)["num_hidden_layers"]
    held: Tensors = {}

    def add(tensors: Tensors) -> None:
        tensors.update(_predictor(tensors, f"model.layers.{layers - 1}.", seed))
        held.update(tensors)

    edit_tensors(path, add)
    return held


def _predictor(tensors: Tensors, last: str, seed: int) -> Tensors:
    """Return tensors named as in XiaomiMiMo/MiMo-7B, of the shapes of the last layer."""
    generator = torch.Generator().manual_seed(seed)
    norm = tensors["model.norm.weight"]
    hidden = len(norm)
    shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
    shapes |= {"input_proj.weight": (hidden, 2 * hidden)}
    shapes |= {n.removeprefix(last): tuple(t.shape) for n, t in tensors.items() if last in n}
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        scaled = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
        made[LAYER + name] = (0.2 * noise if name.endswith("bias") else scaled).to(norm.dtype)
    return made


class PlainMimoMtp:
    """The MTP layer without caches, fp32, after MiMo's report (arXiv 2505.07608) and code.

    ``[hidden_layernorm(h_t); token_layernorm(embedding of t + 1)]`` is projected and passes through
    a layer of Qwen2. The head and the next level read the normed result.
    """

    def __init__(self, tensors: Tensors, *, heads: int, kv_heads: int, eps: float, theta: float):
        self.w = {name: tensor.float() for name, tensor in tensors.items()}
        self.heads, self.kv_heads, self.eps, self.theta = heads, kv_heads, eps, theta

    def follow(self, hidden: torch.Tensor, ids: list[int], path: list[int]) -> torch.Tensor:
        """Return logits [1 + m, V] at the last of ``ids`` [L] and along a ``path`` of m drafts.

        ``hidden`` [L, H] are the target's states after its final norm. Row t belongs to ``ids[t]``,
        the token after it.
        """
        found = []
        for place in range(1 + len(path)):
            states = self._layer(hidden, torch.tensor(ids + path[:place]))
            found.append(states[-1])
            hidden = torch.cat([hidden, states[-1:]])
        return torch.stack(found) @ self.w["lm_head.weight"].T

    def _layer(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        token = self._norm(self.w["model.embed_tokens.weight"][ids], "token_layernorm")
        both = torch.cat([self._norm(hidden, "hidden_layernorm"), token], dim=1)
        x = both @ self.w[f"{LAYER}input_proj.weight"].T
        x = x + self._attention(self._norm(x, "input_layernorm"))
        y = self._norm(x, "post_attention_layernorm")
        gate, up = (y @ self.w[f"{LAYER}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ self.w[f"{LAYER}mlp.down_proj.weight"].T
        return self._norm(x, "final_layernorm")

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (self._turned(self._projected(x, name)) for name in ("q", "k"))
        v = self._projected(x, "v")
        shared = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(shared, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        unseen = torch.ones(len(x), len(x)).triu(1).bool()
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1) @ self.w[
            f"{LAYER}self_attn.o_proj.weight"
        ].T

    def _projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return heads of queries, keys or values, [heads, T, D]."""
        stem = f"{LAYER}self_attn.{name}_proj"
        rows = x @ self.w[f"{stem}.weight"].T + self.w[f"{stem}.bias"]
        heads = self.heads if name == "q" else self.kv_heads
        return rows.unflatten(1, (heads, -1)).transpose(0, 1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turn = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), turn)
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.w[f"{LAYER}{name}.weight"]
