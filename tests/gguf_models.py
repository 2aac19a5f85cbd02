"""The same small random models as safetensors and as GGUF, with bitwise equal numbers.

Every tensor is first stored in a GGUF type. The safetensors have the values that this type
represents. Rows and experts are reordered as llama.cpp's converter does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_files import Tensors
from gguf_files import Stored, stored
from llama_checkpoints import OF_KIND
from safetensors.torch import load_file, save_file

COMMON = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
# The parts of an expert with another name in GGUF.
EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
# Models whose rows that RoPE rotates together are adjacent in GGUF.
PAIRS = ("llama", "mixtral", "ministral3", "smollm3", "granite")
_OF_DELTA = {
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
# Names that differ from :data:`COMMON`, by the prefix of the model type.
OWN_NAMES = {
    "gemma4": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
        "router.proj.weight": "ffn_gate_inp.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate.weight": "inp_gate.weight",
        "per_layer_projection.weight": "proj.weight",
        "post_per_layer_input_norm.weight": "post_norm.weight",
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    },
    "gemma": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    },
    "glm4_moe": {"post_attention_layernorm.weight": "post_attention_norm.weight"},
    "qwen3_next": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        # With the gate as attn_gate.weight.
        "linear_attn.in_proj_qkvz.weight": "attn_qkv.weight",
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
        **_OF_DELTA,
    },
    "qwen3_5": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        **_OF_DELTA,
    },
    "olmo": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
}
LLAMA3_ROPE = OF_KIND["llama"]["rope_parameters"] | {"original_max_position_embeddings": 8192}
MXFP4 = gguf.GGMLQuantizationType.MXFP4


@dataclass
class Twin:
    """A model's tensors in both forms. ``kinds`` gives the type of each Hugging Face tensor."""

    kinds: Callable[[str, tuple[int, ...]], str]
    names: Mapping[str, str] = field(default_factory=lambda: COMMON)
    hf: Tensors = field(default_factory=dict)
    gguf: dict[str, Stored] = field(default_factory=dict)

    def take(self, name: str, tensor: torch.Tensor) -> Stored:
        """Store a tensor in its GGUF type; Hugging Face's form gets its values."""
        found, self.hf[name] = stored(tensor, self.kinds(name, tuple(tensor.shape)))
        return found

    def same(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor that differs only in its name."""
        self.gguf[self.called(name)] = self.take(name, tensor)

    def called(self, name: str) -> str:
        """Return the tensor's name in GGUF."""
        if name in self.names:
            return self.names[name]
        _, _, layer, inner = name.split(".", 3)
        return f"blk.{layer}.{self.names[inner]}"

    def stacked(self, name: str, experts: list[tuple[str, torch.Tensor]]) -> None:
        """Store experts as one GGUF tensor."""
        taken = [self.take(*expert) for expert in experts]
        self.gguf[name] = np.stack([array for array, _ in taken]), taken[0][1]


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Return the types of a mixture: F32 for small tensors, others as row sizes allow."""
    if len(shape) == 1 or name.endswith(("gate.weight", "router.weight", "bias")):
        return "F32"
    wide = ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0", "Q2_K", "Q3_K", "IQ4_XS", "NVFP4", "MXFP4")
    narrow = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
    plain = ("F16", "BF16", "F32")
    fits = wide if shape[-1] % 256 == 0 else narrow if shape[-1] % 32 == 0 else plain
    return fits[sum(name.encode()) % len(fits)]


def llama3_factors(width: int) -> torch.Tensor:
    """Return the divisor of each frequency in Llama 3's scaling, as llama.cpp computes it."""
    found = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * 10000.0 ** (2 * pair / width)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(found)


def rewritten(model: Path, hf: Mapping[str, torch.Tensor]) -> None:
    """Write the checkpoint with the values of its GGUF twin."""
    kept = {name: tensor.contiguous() for name, tensor in hf.items()}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def gpt_oss_twin(model: Path) -> dict[str, Stored]:
    """Return the GGUF form of the GPT-OSS at ``model``, with its values."""
    given = load_file(model / "model.safetensors")
    packed = any(name.endswith("_blocks") for name in given)
    # Transposed matrices keep their types element by element.
    twin = Twin(lambda name, shape: "F16" if "experts" in name else mixed(name, shape))
    for name, tensor in given.items():
        stem, parts = name.rpartition(".")[2], name.split(".")
        layer = parts[2] if len(parts) > 3 else ""
        if stem in ("gate_up_proj_bias", "down_proj_bias"):
            biases, dtype = stored(tensor, "F32")[0]
            twin.hf[name] = tensor.float()
            for part, rows in _experts(stem, biases).items():
                twin.gguf[f"blk.{layer}.ffn_{part}_exps.bias"] = rows, dtype
        elif stem in ("gate_up_proj", "down_proj"):
            array, dtype = twin.take(name, tensor)
            for part, rows in _experts(stem, array.swapaxes(1, 2)).items():
                twin.gguf[f"blk.{layer}.ffn_{part}_exps.weight"] = rows, dtype
        elif stem.endswith("_blocks"):
            twin.hf[name] = tensor
            scales = given[name.replace("_blocks", "_scales")]
            raw = _mxfp4_blocks(tensor.numpy(), scales.numpy())
            for part, rows in _experts(stem, raw).items():
                twin.gguf[f"blk.{layer}.ffn_{part}_exps.weight"] = rows, MXFP4
        elif stem.endswith("_scales"):
            twin.hf[name] = tensor
        else:
            twin.same(name, tensor)
    assert packed == any(dtype == MXFP4 for _, dtype in twin.gguf.values())
    rewritten(model, twin.hf)
    return {
        name.replace("ffn_norm", "post_attention_norm"): array for name, array in twin.gguf.items()
    }


def llama_twin(model: Path, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the GGUF form of a model with grouped-query attention.

    The rows that RoPE rotates together are adjacent for the models of :data:`PAIRS`.
    """
    own_type = config["model_type"]
    own = [names for kind, names in OWN_NAMES.items() if own_type.startswith(kind)]
    # Columns of a matrix that is quantized do not move.
    kinds = lambda name, shape: "F32" if "linear_attn" in name else mixed(name, shape)  # noqa: E731
    twin = Twin(kinds, {**COMMON, **(own[0] if own else {})})
    experts: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        parts = name.split(".")
        if "experts" in parts and not own_type.startswith("gemma4"):
            experts.setdefault(_stack_of(parts), []).append((name, tensor))
            continue
        twin.same(name, tensor)
        if "linear_attn" in parts:
            (_next_twin if own_type == "qwen3_next" else _delta_twin)(twin, name, config)
            continue
        if name.endswith("shared_expert_gate.weight"):
            array, dtype = twin.gguf[twin.called(name)]
            twin.gguf[twin.called(name)] = array.reshape(-1), dtype
        if own_type.startswith(("gemma3", "qwen3_5", "qwen3_next")) and name.endswith(
            "norm.weight"
        ):
            array, dtype = twin.gguf[twin.called(name)]
            twin.gguf[twin.called(name)] = array + np.float32(1), dtype
            twin.hf[name] = torch.from_numpy(twin.gguf[twin.called(name)][0] - np.float32(1))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(parts[-2])
        if heads and config["model_type"] in PAIRS:
            rows, dtype = twin.gguf[twin.called(name)]
            halves = rows.reshape(config[heads], 2, -1, *rows.shape[1:])
            twin.gguf[twin.called(name)] = halves.swapaxes(1, 2).reshape(rows.shape), dtype
    _stack(twin, experts)
    rewritten(model, twin.hf)
    return twin.gguf


def _delta_twin(twin: Twin, name: str, config: Mapping[str, Any]) -> None:
    """Reorder the value heads of a gated delta net as llama.cpp's converter does.

    Head j of key head i becomes head ``j * keys + i``; in checkpoints it is ``i * shared + j``.
    """
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shared, width = value_heads // key_heads, config["linear_value_head_dim"]
    order = [i * shared + j for j in range(shared) for i in range(key_heads)]
    spread = [head * width + x for head in order for x in range(width)]
    array, dtype = twin.gguf[twin.called(name)]
    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * key_heads * config["linear_key_head_dim"]
        array = np.concatenate([array[:first], array[first:][spread]]).squeeze()
    elif part == "in_proj_z.weight":
        array = array[spread]
    elif part == "out_proj.weight":
        array = array[:, spread]
    elif part in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias"):
        array = array[order]
    elif part == "A_log":
        array = -np.exp(array[order])
        back = np.argsort(order)
        twin.hf[name] = torch.from_numpy(-array[back]).log()
    twin.gguf[twin.called(name)] = np.ascontiguousarray(array), dtype


def _next_twin(twin: Twin, name: str, config: Mapping[str, Any]) -> None:
    """Split Qwen3-Next's projection as llama.cpp's converter does: z from q, k and v.

    Value heads keep their order.
    """
    array, dtype = twin.gguf[twin.called(name)]
    part = name.rpartition("linear_attn.")[2]
    if part == "in_proj_qkvz.weight":
        heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
        own = array.reshape(heads, -1, array.shape[1])
        values = (own.shape[1] - 2 * width) // 2
        ends = np.cumsum([width, width, values])
        split = [rows.reshape(-1, array.shape[1]) for rows in np.split(own, ends, axis=1)]
        array = np.concatenate(split[:3])
        gate = twin.called(name).replace("attn_qkv", "attn_gate")
        twin.gguf[gate] = np.ascontiguousarray(split[3]), dtype
    elif part == "conv1d.weight":
        array = array.squeeze()
    elif part == "A_log":
        array = -np.exp(array)
        twin.hf[name] = torch.from_numpy(-array).log()
    twin.gguf[twin.called(name)] = np.ascontiguousarray(array), dtype


def deepseek_twin(model: Path, config: Mapping[str, Any], *, apart: bool) -> dict[str, Stored]:
    """Return the GGUF form of a model with DeepSeek's attention.

    ``apart``: the halves of keys and values are separate tensors.
    """
    twin = Twin(mixed)
    experts: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        parts = name.split(".")
        if "experts" in parts:
            experts.setdefault(_stack_of(parts), []).append((name, tensor))
        elif apart and "kv_b_proj" in parts:
            value, twin.hf[name] = stored(tensor, "F16")
            heads = value[0].reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            twin.gguf[f"blk.{parts[2]}.attn_k_b.weight"] = keys.swapaxes(1, 2), value[1]
            twin.gguf[f"blk.{parts[2]}.attn_v_b.weight"] = values, value[1]
        else:
            twin.same(name, tensor)
    _stack(twin, experts)
    rewritten(model, twin.hf)
    return twin.gguf


def _stack_of(parts: list[str]) -> str:
    """Return the tensor that holds an expert's matrix together with the others."""
    part = EXPERT_PARTS.get(parts[6], parts[6].removesuffix("_proj"))
    return f"blk.{parts[2]}.ffn_{part}_exps.weight"


def _stack(twin: Twin, experts: Mapping[str, list[tuple[str, torch.Tensor]]]) -> None:
    for key, found in experts.items():
        # One tensor has one type.
        kind = mixed(key, tuple(found[0][1].shape))
        one = Twin(lambda _name, _shape, kind=kind: kind, twin.names, twin.hf, twin.gguf)
        one.stacked(key, sorted(found, key=lambda entry: int(entry[0].split(".")[5])))


def _experts(stem: str, array: np.ndarray) -> dict[str, np.ndarray]:
    if stem.startswith("down"):
        return {"down": array}
    return {"gate": array[:, ::2], "up": array[:, 1::2]}


def _mxfp4_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Repack bytes with the even element low as blocks of two halves."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    nibbles = codes[..., :16] | (codes[..., 16:] << 4)
    raw = np.concatenate([scales[..., None], nibbles], -1)
    return raw.reshape(*raw.shape[:-2], -1)
