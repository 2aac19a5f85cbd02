"""The example target's sizes, and its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A GPT-OSS of 7.5 million parameters: deep and narrow, so that drafting pays on a CPU."""

    vocabulary: int = 4096
    hidden: int = 192
    layers: int = 24
    query_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 128
    experts: int = 8
    experts_per_token: int = 4
    intermediate: int = 32
    context: int = 4096
    original_context: int = 1024
    rope_theta: float = 150000.0
    yarn_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rms_eps: float = 1e-5
    swiglu_limit: float = 7.0
    end_of_text: int = 0
    pad: int = 2

    def is_sliding(self, layer: int) -> bool:
        """Tell whether `layer` attends within the window only."""
        return layer % 2 == 0

    def hf_config(self) -> dict[str, object]:
        """Return the contents of `config.json`, with the keys of the GPT-OSS release."""
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "sliding_window": self.window,
            "layer_types": [
                "sliding_attention" if self.is_sliding(layer) else "full_attention"
                for layer in range(self.layers)
            ],
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "experts_per_token": self.experts_per_token,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "initial_context_length": self.original_context,
            "rope_theta": self.rope_theta,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.original_context,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": False,
            },
            "rms_norm_eps": self.rms_eps,
            "swiglu_limit": self.swiglu_limit,
            "hidden_act": "silu",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "initializer_range": 0.02,
            "use_cache": True,
            "eos_token_id": self.end_of_text,
            "pad_token_id": self.pad,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }
