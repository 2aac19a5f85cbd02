"""Names of the parts of a layer that several architectures share."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.made import single_experts
from specbuild.builder.checkpoint.source import Tensors

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {
    f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight"
    for part in ("gate", "up", "down")
}


def taken_experts(parts: dict[str, GgufTensor], prefix: str, experts: int) -> Tensors:
    """Split the stacked experts of ``parts`` into one tensor each."""
    made: Tensors = {}
    for given, name in _EXPERTS.items():
        stacked = parts.get(given)
        # Other shapes stay unchanged for the audit to report.
        if stacked is not None and len(stacked.shape) == 3 and stacked.shape[0] == experts:
            made |= single_experts(f"{prefix}{name}", parts.pop(given))
    return made
