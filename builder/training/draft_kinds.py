"""The kinds of drafts that can be trained: their modules, objectives and files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specbuild.builder.families.dflash import config as dflash
from specbuild.builder.families.eagle3 import config as eagle3
from specbuild.builder.training.config import TrainOptions
from specbuild.builder.training.dflash_module import DFlashModule
from specbuild.builder.training.draft_layers import DraftShape, TrainableDraft
from specbuild.builder.training.draft_module import DraftModule
from specbuild.builder.training.p_eagle_module import PEagleModule
from specbuild.builder.training.vocabulary import DraftVocabulary

EAGLE3_DECAY = 0.8
# (largest block, γ) of DFlash, where position k has the weight exp(−k / γ) (arXiv 2602.06036,
# section 4).
_GAMMAS = ((8, 4.0), (10, 5.0))
_MAX_GAMMA = 7.0


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft. With ``own_vocabulary`` it has its own head and vocabulary.

    ``decay`` is the weight of a position relative to the one before. ``hard`` is defined by the
    objective. ``config`` returns the fields of ``config.json`` that ``layer_config`` lacks.
    """

    own_vocabulary: bool
    hard: bool
    decay: Callable[[TrainOptions], float]
    make: Callable[[DraftShape, TrainOptions, int], TrainableDraft]
    config: Callable[[DraftShape, TrainOptions, int], dict[str, Any]]


def kind_of(options: TrainOptions) -> DraftKind:
    """Return the requested kind."""
    return KINDS[options.kind]


def layer_config(shape: DraftShape, target_vocab: int, positions: int) -> dict[str, Any]:
    """Return the fields of ``config.json`` that every kind has."""
    return {
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.target_hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": positions,
        "vocab_size": target_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def draft_tensors(
    draft: TrainableDraft, vocabulary: DraftVocabulary, *, own_vocabulary: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``model.safetensors``: weights bf16, ``d2t`` int64, ``t2d`` bool."""
    weights = {
        name: value.detach().cpu().to(torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
    }
    return weights | ({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d} if own_vocabulary else {})


def _eagle3(shape: DraftShape, _options: TrainOptions, _mask: int) -> dict[str, Any]:
    return {
        "architectures": [eagle3.OWN_ARCHITECTURE],
        "model_type": eagle3.OWN_MODEL_TYPE,
        "draft_vocab_size": shape.vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "use_aux_hidden_state": True,
        },
    }


def _p_eagle(shape: DraftShape, options: TrainOptions, mask: int) -> dict[str, Any]:
    return _eagle3(shape, options, mask) | {"parallel_drafting": True, "ptd_token_id": mask}


def _dflash(shape: DraftShape, options: TrainOptions, mask: int) -> dict[str, Any]:
    dflash_fields: dict[str, Any] = {
        "mask_token_id": mask,
        "target_layer_ids": list(shape.aux_layers),
    }
    if options.kind == "jetspec":
        dflash_fields["causal_head"] = True
    return {
        "architectures": [dflash.OWN_ARCHITECTURE],
        "model_type": dflash.OWN_MODEL_TYPE,
        "block_size": options.ttt_steps + 1,
        "dflash_config": dflash_fields,
        "layer_types": ["full_attention"] * shape.layers,
    }


def _block_decay(options: TrainOptions) -> float:
    block = options.ttt_steps + 1
    gamma = next((g for size, g in _GAMMAS if block <= size), _MAX_GAMMA)
    return math.exp(-1 / gamma)


def _make_dflash(shape: DraftShape, options: TrainOptions, mask: int) -> TrainableDraft:
    causal = options.kind == "jetspec"
    return DFlashModule(shape, mask_token=mask, causal=causal, anchors=options.anchors)


KINDS: dict[str, DraftKind] = {
    "eagle3": DraftKind(
        own_vocabulary=True,
        hard=False,
        decay=lambda _: EAGLE3_DECAY,
        make=lambda shape, _options, _mask: DraftModule(shape),
        config=_eagle3,
    ),
    # Each row has the same weight, and further positions have fewer rows.
    "p-eagle": DraftKind(
        own_vocabulary=True,
        hard=False,
        decay=lambda options: options.keep,
        make=lambda shape, options, mask: PEagleModule(shape, mask_token=mask, keep=options.keep),
        config=_p_eagle,
    ),
    "dflash": DraftKind(
        own_vocabulary=False, hard=True, decay=_block_decay, make=_make_dflash, config=_dflash
    ),
    # JetSpec distills the target's distribution (arXiv 2606.18394, section 3.2).
    "jetspec": DraftKind(
        own_vocabulary=False, hard=False, decay=_block_decay, make=_make_dflash, config=_dflash
    ),
}
