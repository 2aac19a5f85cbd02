"""Synthetic EAGLE3 drafts: the geometry for a target, and its configuration."""

from __future__ import annotations

from typing import Any

from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.families.eagle3.checkpoint import default_aux_layers
from specbuild.builder.families.eagle3.config import OWN_ARCHITECTURE
from specbuild.builder.families.eagle3.synth_weights import DraftWriter
from specbuild.builder.families.family import DraftSizes, SynthDraft
from specbuild.builder.synth.configs import rope_config
from specbuild.builder.synth.draft_heads import draft_heads
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry, Eagle3Record
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def draft_geometry(target: TargetGeometry, sizes: DraftSizes) -> Eagle3Geometry:
    """Return the draft of a target, with the target's attention and rotary embedding.

    The draft of a target with MLA has ordinary attention with heads of 128.
    """
    heads = draft_heads(target)
    return Eagle3Geometry(
        architecture=OWN_ARCHITECTURE,
        hidden=target.hidden,
        vocab=sizes.vocab,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        inner=sizes.inner,
        rms_eps=1e-5,
        rope=heads.rope,
        aux_layers=default_aux_layers(target.layers),
        max_positions=target.max_positions,
        d2t_form="offsets",
        sliding_window=0,
        own_embedding=False,
        own_head=True,
        norm_before_fc=False,
        input_width="embedding_and_hidden",
        norm_before_residual=False,
        norm_output=False,
    )


def draft_config(d: Eagle3Geometry, target: TargetGeometry) -> dict[str, Any]:
    """Return the ``config.json`` of this geometry."""
    return {
        "architectures": [d.architecture],
        "attention_bias": False,
        "draft_vocab_size": d.vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(d.aux_layers),
            "use_aux_hidden_state": True,
        },
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "intermediate_size": d.inner,
        "max_position_embeddings": d.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": d.q_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": d.kv_heads,
        "rms_norm_eps": d.rms_eps,
        "rope_scaling": rope_config(d.rope),
        "rope_theta": d.rope.theta,
        "target_hidden_size": target.hidden,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab,
    }


def draft_checkpoint(d: Eagle3Geometry, tensors: dict[str, SourceTensor]) -> DraftCheckpoint:
    """Return the result of reading these tensors."""
    engine_tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    return DraftCheckpoint(d, engine_tensors, (), Eagle3Record)


EAGLE3_SYNTH = SynthDraft(
    geometry=draft_geometry,
    config=draft_config,
    tensors=lambda *parts: DraftWriter(*parts).tensors(),
    checkpoint=draft_checkpoint,
)
