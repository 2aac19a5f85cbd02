"""Random weights of GPT-OSS targets and EAGLE3 drafts.

They are seeded, and scaled so that activations and logits are about 1. No bias, sink or norm is
trivial.
"""

from __future__ import annotations

import math

import torch

E2M1_RMS = 2.93  # of uniformly drawn e2m1 codes

Tensors = dict[str, torch.Tensor]


def target_tensors(
    generator: torch.Generator,
    *,
    layers: int,
    hidden: int,
    q_width: int,
    kv_width: int,
    q_heads: int,
    experts: int,
    inner: int,
    vocab: int,
    mxfp4: bool,
    dtype: torch.dtype,
) -> Tensors:
    """Return a GPT-OSS under the names of the "hf" layout."""
    draw = Draw(generator, dtype)
    tensors = {
        "model.embed_tokens.weight": draw.normal(vocab, hidden, std=1.0),
        "lm_head.weight": draw.normal(vocab, hidden, std=3 / math.sqrt(hidden)),
        "model.norm.weight": draw.norm(hidden),
    }
    for index in range(layers):
        layer = f"model.layers.{index}."
        tensors[f"{layer}input_layernorm.weight"] = draw.norm(hidden)
        tensors[f"{layer}post_attention_layernorm.weight"] = draw.norm(hidden)
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        for name, outputs, inputs in (
            ("q_proj", q_width, hidden),
            ("k_proj", kv_width, hidden),
            ("v_proj", kv_width, hidden),
            ("o_proj", hidden, q_width),
        ):
            tensors[f"{attention}{name}.weight"] = draw.linear(outputs, inputs)
            tensors[f"{attention}{name}.bias"] = draw.normal(outputs, std=0.2)
        tensors[f"{attention}sinks"] = draw.normal(q_heads, std=1.0)
        tensors[f"{mlp}router.weight"] = draw.normal(experts, hidden, std=2 / math.sqrt(hidden))
        tensors[f"{mlp}router.bias"] = draw.normal(experts, std=0.2)
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            weight = f"{mlp}experts.{name}"
            tensors[f"{weight}_bias"] = draw.normal(experts, outputs, std=0.2)
            if mxfp4:
                blocks, scales = draw.mxfp4(experts, outputs, inputs)
                tensors[f"{weight}_blocks"], tensors[f"{weight}_scales"] = blocks, scales
            else:
                tensors[weight] = draw.normal(experts, inputs, outputs, std=1 / math.sqrt(inputs))
    return tensors


def draft_tensors(
    generator: torch.Generator,
    *,
    hidden: int,
    inner: int,
    q_width: int,
    kv_width: int,
    input_size: int,
    target_hidden: int,
    aux_layers: int,
    draft_vocab: int | None,
    norm_before_fc: bool,
    fc_norm: bool,
    dtype: torch.dtype,
    layers: int = 1,
) -> Tensors:
    """Return an EAGLE3 draft with ``midlayer.`` names, without embedding, ``d2t`` and ``t2d``."""
    draw = Draw(generator, dtype)
    tensors = {
        "fc.weight": draw.linear(hidden, aux_layers * target_hidden),
        "norm.weight": draw.norm(hidden),
        "midlayer.hidden_norm.weight": draw.norm(hidden),
        "midlayer.post_attention_layernorm.weight": draw.norm(hidden),
        "midlayer.self_attn.q_proj.weight": draw.linear(q_width, input_size),
        "midlayer.self_attn.k_proj.weight": draw.linear(kv_width, input_size),
        "midlayer.self_attn.v_proj.weight": draw.linear(kv_width, input_size),
        "midlayer.self_attn.o_proj.weight": draw.linear(hidden, q_width),
        "midlayer.mlp.gate_proj.weight": draw.linear(inner, hidden),
        "midlayer.mlp.up_proj.weight": draw.linear(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw.linear(hidden, inner),
    }
    if input_size == 2 * hidden:
        tensors["midlayer.input_layernorm.weight"] = draw.norm(hidden)
    for index in range(1, layers):
        tensors |= _deep_layer(draw, f"layers.{index}.", hidden, inner, (q_width, kv_width))
    if norm_before_fc:
        tensors["input_norm.weight"] = draw.norm(aux_layers * target_hidden)
    if fc_norm:
        for aux_layer in range(aux_layers):
            tensors[f"fc_norm.{aux_layer}.weight"] = draw.norm(target_hidden)
    if draft_vocab is not None:
        tensors["lm_head.weight"] = draw.normal(draft_vocab, hidden, std=3 / math.sqrt(hidden))
    return tensors


def _deep_layer(
    draw: Draw, prefix: str, hidden: int, inner: int, widths: tuple[int, int]
) -> Tensors:
    """Return a LLaMA layer with queries and keys of ``widths``."""
    q_width, kv_width = widths
    made = {f"{name}_layernorm.weight": draw.norm(hidden) for name in ("input", "post_attention")}
    made |= {f"self_attn.{p}_proj.weight": draw.linear(kv_width, hidden) for p in "kv"}
    made["self_attn.q_proj.weight"] = draw.linear(q_width, hidden)
    made["self_attn.o_proj.weight"] = draw.linear(hidden, q_width)
    made |= {f"mlp.{part}_proj.weight": draw.linear(inner, hidden) for part in ("gate", "up")}
    made["mlp.down_proj.weight"] = draw.linear(hidden, inner)
    return {f"{prefix}{name}": tensor for name, tensor in made.items()}


def latent_attention(
    generator: torch.Generator, prefix: str, inputs: int, sizes: dict[str, int | None]
) -> Tensors:
    """Return the bf16 tensors of MLA with a config's sizes; its input has ``inputs`` columns."""
    draw, hidden = Draw(generator, torch.bfloat16), sizes["hidden_size"]
    heads, rank, value = sizes["num_attention_heads"], sizes["kv_lora_rank"], sizes["v_head_dim"]
    nope, rope, query = (sizes[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank"))
    assert hidden and heads and rank and value and nope and rope
    made = {"q_proj.weight": draw.linear(heads * (nope + rope), inputs)}
    if query is not None:
        made = {
            "q_a_proj.weight": draw.linear(query, inputs),
            "q_a_layernorm.weight": draw.norm(query),
            "q_b_proj.weight": draw.linear(heads * (nope + rope), query),
        }
    made |= {
        "kv_a_proj_with_mqa.weight": draw.linear(rank + rope, inputs),
        "kv_a_layernorm.weight": draw.norm(rank),
        "kv_b_proj.weight": draw.linear(heads * (nope + value), rank),
        "o_proj.weight": draw.linear(hidden, heads * value),
    }
    return {f"{prefix}{name}": tensor for name, tensor in made.items()}


class Draw:
    """Seeded random tensors of one dtype."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        self.generator = generator
        self.dtype = dtype

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * std).to(self.dtype)

    def linear(self, outputs: int, inputs: int) -> torch.Tensor:
        return self.normal(outputs, inputs, std=1 / math.sqrt(inputs))

    def norm(self, width: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(width, generator=self.generator)).to(self.dtype)

    def mxfp4(self, experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random blocks [E, O, I/32, 16], scales [E, O, I/32]; weights near 1/sqrt(I)."""
        shape = (experts, outputs, inputs // 32)
        centre = round(127 - math.log2(E2M1_RMS * math.sqrt(inputs)))
        blocks = torch.randint(0, 256, (*shape, 16), generator=self.generator, dtype=torch.uint8)
        spread = torch.randint(-1, 2, shape, generator=self.generator)
        return blocks, (centre + spread).to(torch.uint8)


def original_names(tensors: Tensors, layers: int) -> Tensors:
    """Return the tensors under the names of OpenAI's "original" layout."""
    renamed = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
        "norm.scale": tensors["model.norm.weight"],
    }
    for index in range(layers):
        old, new = f"model.layers.{index}.", f"block.{index}."
        attention, experts = f"{old}self_attn.", f"{old}mlp.experts."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{attention}{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{new}attn.qkv.{kind}"] = torch.cat(parts)
            renamed[f"{new}attn.out.{kind}"] = tensors[f"{attention}o_proj.{kind}"]
            renamed[f"{new}mlp.gate.{kind}"] = tensors[f"{old}mlp.router.{kind}"]
        renamed[f"{new}attn.norm.scale"] = tensors[f"{old}input_layernorm.weight"]
        renamed[f"{new}attn.sinks"] = tensors[f"{attention}sinks"]
        renamed[f"{new}mlp.norm.scale"] = tensors[f"{old}post_attention_layernorm.weight"]
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            renamed[f"{new}mlp.mlp{number}_bias"] = tensors[f"{experts}{name}_bias"]
            for part in ("blocks", "scales"):
                packed = tensors[f"{experts}{name}_{part}"]
                renamed[f"{new}mlp.mlp{number}_weight.{part}"] = packed
    return renamed
