"""OpenAI's original layout of GPT-OSS: its config and its tensor names.

The bytes are those of Hugging Face's layout, except that one tensor has the rows of q, k and v.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import yarn_attention_factor
from specbuild.builder.checkpoint.source import SourceTensor, row_slices
from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling
from specbuild.runtime.errors import SpecbuildError

RMS_EPS = 1e-5  # the layout's config does not have it
RELEASE_VOCAB = 201088
RELEASE_EOS = (200002, 199999, 200012)

OUTER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.weight": "lm_head.weight",
    "norm.scale": "model.norm.weight",
}
BLOCK_NAMES = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.sinks": "self_attn.sinks",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}
BLOCK = re.compile(r"block\.(\d+)\.(.+)")


def is_original(fields: dict[str, Any]) -> bool:
    """Return whether these are the fields of the layout's ``config.json``."""
    return "model_type" not in fields and "rope_scaling_factor" in fields


def read_rope(config: Config) -> Rope:
    """Return the YaRN of the layout's config; its correction range is never truncated."""
    factor = config.number("rope_scaling_factor")
    theta = config.number("rope_theta")
    if theta <= 1:
        raise config.wrong("rope_theta", "a number above 1, the base of the frequencies")
    if factor <= 1:
        return Rope(theta=theta)
    return Rope(
        theta,
        YarnScaling(
            factor=factor,
            original_max_positions=config.integer("initial_context_length"),
            beta_fast=config.number("rope_ntk_beta", 32.0),
            beta_slow=config.number("rope_ntk_alpha", 1.0),
            truncate=False,
            attention_factor=yarn_attention_factor(factor),
        ),
    )


def to_canonical(
    tensors: dict[str, SourceTensor], *, q_rows: int, kv_rows: int
) -> dict[str, SourceTensor]:
    """Return the tensors under Hugging Face's names, with q, k and v split.

    Unknown names stay, for the audit to report.
    """
    canonical: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        block = BLOCK.fullmatch(name)
        layer = f"model.layers.{block[1]}." if block else ""
        inner = block[2] if block else name
        if block and inner in ("attn.qkv.weight", "attn.qkv.bias"):
            kind = inner.rpartition(".")[2]
            canonical |= _split_qkv(tensor, f"{layer}self_attn.", kind, q_rows, kv_rows)
            continue
        names = BLOCK_NAMES if block else OUTER_NAMES
        canonical_name = f"{layer}{names[inner]}" if inner in names else name
        canonical[canonical_name] = dataclasses.replace(tensor, name=canonical_name)
    return canonical


def _split_qkv(
    tensor: SourceTensor, attention: str, kind: str, q_rows: int, kv_rows: int
) -> dict[str, SourceTensor]:
    rows = q_rows + 2 * kv_rows
    if not tensor.shape or tensor.shape[0] != rows:
        raise SpecbuildError(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, expected {rows} rows "
            f"({q_rows} of q, {kv_rows} each of k and v); check that config.json belongs to these "
            "weights"
        )
    counts = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    return row_slices(tensor, {f"{attention}{p}_proj.{kind}": n for p, n in counts.items()})
