"""Write small random checkpoints: GPT-OSS targets and EAGLE3 drafts.

Every function returns the tensors under their canonical names, so that a test can compare them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write_json, write_shards, write_tokenizer
from random_weights import (
    Tensors,
    draft_tensors,
    latent_attention,
    original_names,
    target_tensors,
)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def write_target(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    experts: int = 4,
    experts_per_token: int = 2,
    inner: int = 32,
    vocab: int = 256,
    sliding_window: int = 8,
    max_positions: int = 512,
    rope_theta: float = 150000.0,
    rope_factor: float = 4.0,
    experts_format: str = "mxfp4",
    dtype: str = "bf16",
    layout: str = "hf",
    shards: int = 1,
    rope_spelling: str = "rope_parameters",
    tokenizer: bool = False,
    chat_template: str | None = None,
    eos: tuple[int, ...] = (0, 2),
    config_changes: dict[str, Any] | None = None,
) -> Tensors:
    """Write a random GPT-OSS under ``path``; the result has the names of the "hf" layout.

    ``experts_format`` "mxfp4" or "bf16" (dense experts in ``dtype``); ``layout`` "hf" or "original"
    (mxfp4 only); ``rope_spelling`` "rope_parameters" or "rope_scaling" (hf only). ``tokenizer``
    adds a byte-level BPE whose ids 0, 1, 2 are ``SPECIAL_TOKENS``; it needs a vocabulary of 260 or
    more. A value None in ``config_changes`` removes the key.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = target_tensors(
        torch.Generator().manual_seed(seed),
        layers=layers,
        hidden=hidden,
        q_width=q_heads * head_dim,
        kv_width=kv_heads * head_dim,
        q_heads=q_heads,
        experts=experts,
        inner=inner,
        vocab=vocab,
        mxfp4=experts_format == "mxfp4",
        dtype=DTYPES[dtype],
    )
    common = {
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "swiglu_limit": 7.0,
        "head_dim": head_dim,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "sliding_window": sliding_window,
        "rope_theta": rope_theta,
    }
    original_positions = int(max_positions // rope_factor)
    if layout == "original":
        config = common | {
            "num_experts": experts,
            "experts_per_token": experts_per_token,
            "initial_context_length": original_positions,
            "rope_scaling_factor": rope_factor,
            "rope_ntk_alpha": 1,
            "rope_ntk_beta": 32,
        }
        written = original_names(tensors, layers)
    else:
        config = common | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": eos[0],
            "hidden_act": "silu",
            "initial_context_length": original_positions,
            "initializer_range": 0.02,
            "layer_types": [
                "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
            ],
            "max_position_embeddings": max_positions,
            "num_experts_per_tok": experts_per_token,
            "experts_per_token": experts_per_token,
            "num_local_experts": experts,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.9,
            "tie_word_embeddings": False,
            "torch_dtype": CONFIG_DTYPES[dtype],
            "transformers_version": "4.55.0",
            "use_cache": True,
        }
        _spell_rope(config, rope_spelling, rope_theta, rope_factor, original_positions)
        if experts_format == "mxfp4":
            config["quantization_config"] = {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            }
        generation = {"bos_token_id": 1, "do_sample": True, "eos_token_id": list(eos)}
        write_json(path / "generation_config.json", generation | {"pad_token_id": 1})
        written = tensors
    _write(path, _changed(config, config_changes), written, shards)
    if tokenizer:
        write_tokenizer(path, vocab)
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return tensors


def write_draft(
    path: Path,
    *,
    seed: int = 1,
    target_layers: int = 4,
    target_hidden: int = 64,
    target_vocab: int = 256,
    hidden: int = 64,
    inner: int = 96,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    draft_vocab: int | None = 128,
    aux_layers: tuple[int, ...] | None = None,
    name_aux_layers: bool = True,
    max_positions: int = 512,
    prefix: str = "midlayer",
    own_embedding: bool = False,
    t2d: bool = True,
    input_width: str = "embedding_and_hidden",
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    rope_theta: float | None = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    sliding_window: int | None = None,
    dtype: str = "bf16",
    architecture: str = "LlamaForCausalLMEagle3",
    shards: int = 1,
    layers: int = 1,
    latent: dict[str, Any] | None = None,
    config_changes: dict[str, Any] | None = None,
) -> Tensors:
    """Write a random EAGLE3 draft under ``path``; the result has the ``midlayer.`` names.

    ``aux_layers`` None means ``default_aux_layers``; ``name_aux_layers`` False leaves the list out
    of the config. ``draft_vocab`` None shares the target's head (no ``lm_head``, no ``d2t``).
    ``norm_before_fc``: one norm over the concatenated states (``input_norm.weight``); ``fc_norm``:
    one per state (``fc_norm.<i>.weight``). ``prefix`` "midlayer" or "layers.0". ``latent`` are the
    sizes of MLA, by their names in a config. The architecture
    ``Eagle3Speculator`` comes with its nested config. A value None in ``config_changes`` removes
    the key.
    """
    path.mkdir(parents=True, exist_ok=True)
    aux_layers = default_aux_layers(target_layers) if aux_layers is None else aux_layers
    tensors = draft_tensors(
        torch.Generator().manual_seed(seed),
        hidden=hidden,
        inner=inner,
        q_width=q_heads * head_dim,
        kv_width=kv_heads * head_dim,
        input_size=hidden * (2 if input_width == "embedding_and_hidden" else 1),
        target_hidden=target_hidden,
        aux_layers=len(aux_layers),
        draft_vocab=draft_vocab,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        dtype=DTYPES[dtype],
        layers=layers,
    )
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    if latent is not None:
        sizes = latent | {"hidden_size": hidden, "num_attention_heads": q_heads}
        for layer in ("midlayer.", *[f"layers.{i}." for i in range(1, layers)]):
            attention = f"{layer}self_attn."
            tensors = {n: t for n, t in tensors.items() if not n.startswith(attention)}
            inputs = 2 * hidden if layer == "midlayer." and input_width != "hidden" else hidden
            tensors |= latent_attention(generator, attention, inputs, sizes)
    if own_embedding:
        embedding = torch.randn(target_vocab, hidden, generator=generator)
        tensors["embed_tokens.weight"] = embedding.to(DTYPES[dtype])
    if draft_vocab is not None:
        chosen = torch.randperm(target_vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        if t2d:
            member = torch.zeros(target_vocab, dtype=torch.bool)
            member[chosen] = True
            tensors["t2d"] = member
    decoder: dict[str, Any] = {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": max_positions,
        "mlp_bias": False,
        "num_attention_heads": q_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_scaling": rope_scaling,
        "use_cache": True,
        "vocab_size": target_vocab,
    }
    if rope_theta is not None:
        decoder["rope_theta"] = rope_theta
    if sliding_window is not None:
        decoder |= {"sliding_window": sliding_window, "use_sliding_window": True}
    if latent is not None:
        decoder |= latent | {"model_type": "deepseek_v3", "num_key_value_heads": q_heads}
    flags = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    config: dict[str, Any] = {
        "architectures": [architecture],
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target_hidden,
        "torch_dtype": CONFIG_DTYPES[dtype],
        "transformers_version": "4.55.0",
        "tie_word_embeddings": False,
    }
    if architecture == "Eagle3Speculator":
        config |= flags | {
            "model_type": "speculators",
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1.0",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": decoder,
        }
        if name_aux_layers:  # this format counts boundaries: 1 is the output of layer 0
            config["eagle_aux_hidden_state_layer_ids"] = [aux_layer + 1 for aux_layer in aux_layers]
    else:
        config = decoder | config | {name: True for name, value in flags.items() if value}
        if name_aux_layers:
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(aux_layers),
                "use_aux_hidden_state": True,
            }
    written = {name.replace("midlayer", prefix): tensor for name, tensor in tensors.items()}
    _write(path, _changed(config, config_changes), written, shards)
    return tensors


def write_pair(path: Path) -> None:
    """Write ``target`` and ``draft``: two layers of four experts, heads of 32."""
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "target", layers=2, experts=4, experts_per_token=2, **sizes)
    write_draft(path / "draft", target_layers=2, target_hidden=96, inner=64, **sizes)


def default_aux_layers(target_layers: int) -> tuple[int, int, int]:
    """Return the target layers that a draft reads if its config names none."""
    if target_layers > 5:
        return 1, target_layers // 2 - 1, target_layers - 4
    return 0, target_layers // 2, target_layers - 1


def write_two_layers(path: Path) -> None:
    """Write a GPT-OSS of two layers with the example's widths, and a draft, below ``path``."""
    sizes = {"hidden": 192, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "target", layers=2, experts=8, experts_per_token=4, **sizes)
    write_draft(path / "draft", target_layers=2, target_hidden=192, inner=384, **sizes)


def _spell_rope(
    config: dict[str, Any], spelling: str, theta: float, factor: float, original_positions: int
) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": original_positions,
    }
    if spelling == "rope_parameters":
        del config["rope_theta"]
        config["rope_parameters"] = yarn | {"rope_theta": theta}
    else:
        config["rope_scaling"] = yarn


def _changed(config: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    merged = config | (changes or {})
    dropped = {key for key, value in (changes or {}).items() if value is None}
    return {key: value for key, value in merged.items() if key not in dropped}


def _write(path: Path, config: dict[str, Any], tensors: Tensors, shards: int) -> None:
    write_json(path / "config.json", config)
    write_shards(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, shards)
