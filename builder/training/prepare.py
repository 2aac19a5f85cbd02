"""The beginning of a draft's training: sizes, vocabulary and run; and the draft's files."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbuild.builder.families.eagle3.checkpoint import default_aux_layers
from specbuild.builder.training.config import INNER_PER_HIDDEN, MAX_DRAFT_VOCAB, TrainOptions
from specbuild.builder.training.corpus import TrainingText
from specbuild.builder.training.draft_kinds import DraftKind, draft_tensors, kind_of, layer_config
from specbuild.builder.training.draft_layers import DraftShape, TokenWeights
from specbuild.builder.training.frozen_target import FrozenTarget
from specbuild.builder.training.initial_draft import initial_vocabulary, load_initial_weights
from specbuild.builder.training.objective import Objective
from specbuild.builder.training.output import write_draft
from specbuild.builder.training.training_loop import TrainingRun
from specbuild.builder.training.vocabulary import DraftVocabulary, choose_vocabulary
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class DraftTokens:
    """The draft's vocabulary, and the token of masked rows."""

    vocabulary: DraftVocabulary
    mask: int


def draft_shape(options: TrainOptions, model: PreTrainedModel) -> DraftShape:
    """Return the sizes of a draft for this target, as requested or by default.

    Raises SpecbuildError if they fit neither the target nor each other.
    """
    config = model.config
    aux_layers = options.aux_layers or default_aux_layers(config.num_hidden_layers)
    invalid = [layer for layer in aux_layers if not 0 <= layer < config.num_hidden_layers]
    if invalid:
        raise SpecbuildError(
            f"train draft: aux layer {invalid[0]} does not exist in the target, expected 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    if options.draft_vocab is not None and options.draft_vocab > config.vocab_size:
        raise SpecbuildError(
            f"train draft: draft_vocab is {options.draft_vocab}, expected at most the target's "
            f"{config.vocab_size}"
        )
    # Some configs, such as Qwen2's, have no head_dim.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = DraftShape(
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        aux_layers=tuple(aux_layers),
        vocab=_vocab(options, config.vocab_size),
        inner=options.inner or INNER_PER_HIDDEN * config.hidden_size,
        q_heads=options.q_heads or config.num_attention_heads,
        kv_heads=options.kv_heads or config.num_key_value_heads,
        head_dim=options.head_dim or head_dim,
        rope_theta=options.rope_theta,
        rms_eps=config.rms_norm_eps,
        layers=options.layers,
    )
    if shape.q_heads % shape.kv_heads:
        raise SpecbuildError(
            f"train draft: q_heads {shape.q_heads} is not a multiple of kv_heads {shape.kv_heads}"
        )
    return shape


def choose_draft_tokens(
    options: TrainOptions, tokens: np.ndarray, shape: DraftShape, target_vocab: int
) -> DraftTokens:
    """Return the tokens of a draft of these sizes; ``tokens`` int [n] are the training text."""
    return DraftTokens(
        _vocabulary(options, tokens, target_vocab, shape.vocab),
        _mask_token(options, tokens, target_vocab),
    )


def prepare(
    options: TrainOptions,
    model: PreTrainedModel,
    shape: DraftShape,
    draft_tokens: DraftTokens,
    text: TrainingText,
) -> TrainingRun:
    """Return a run at its beginning; the draft has random weights, or those of another draft."""
    kind = kind_of(options)
    draft: Any = kind.make(shape, options, draft_tokens.mask)
    draft.initialise(torch.Generator().manual_seed(options.seed))
    with torch.no_grad():  # the target's head is a good initial value for the draft's
        if kind.own_vocabulary:
            target_ids = draft_tokens.vocabulary.target_ids
            draft.lm_head.weight.copy_(model.lm_head.weight[target_ids].float())
        draft.norm.weight.copy_(model.model.norm.weight.float())
    if options.initial is not None:
        load_initial_weights(options.initial, draft)
    draft.to(options.device)
    dtype = getattr(torch, options.dtype)

    def autocast() -> AbstractContextManager[object]:
        enabled = dtype != torch.float32
        return torch.autocast(options.device, dtype=dtype if enabled else None, enabled=enabled)

    return TrainingRun(
        options=options,
        draft=draft,
        optimiser=torch.optim.AdamW(
            draft.parameters(), lr=options.learning_rate, betas=BETAS, weight_decay=0.0
        ),
        target=FrozenTarget(model, shape.aux_layers),
        objective=_objective(options, kind, model, draft_tokens.vocabulary),
        text=text,
        autocast=autocast,
    )


def write_trained(
    folder: Path, run: TrainingRun, draft_tokens: DraftTokens, positions: int
) -> None:
    """Write the draft's config and weights; its training positions were below ``positions``."""
    kind, shape = kind_of(run.options), run.draft.shape
    layers = layer_config(shape, run.target.model.config.vocab_size, positions)
    tensors = draft_tensors(run.draft, draft_tokens.vocabulary, own_vocabulary=kind.own_vocabulary)
    write_draft(folder, kind.config(shape, run.options, draft_tokens.mask) | layers, tensors)


def _vocab(options: TrainOptions, target_vocab: int) -> int:
    """Return the size of the draft's vocabulary."""
    if not kind_of(options).own_vocabulary:
        return target_vocab
    return options.draft_vocab or min(target_vocab, MAX_DRAFT_VOCAB)


def _vocabulary(
    options: TrainOptions, tokens: np.ndarray, target_vocab: int, size: int
) -> DraftVocabulary:
    """Return the initial draft's vocabulary, or the most frequent tokens of the text."""
    vocabulary = None
    if options.initial is not None and kind_of(options).own_vocabulary:
        vocabulary = initial_vocabulary(
            options.initial, tokens, target_vocab=target_vocab, size=size
        )
    return vocabulary or choose_vocabulary(tokens, target_vocab=target_vocab, size=size)


def _mask_token(options: TrainOptions, tokens: np.ndarray, target_vocab: int) -> int:
    """Return the token of masked rows: by default the text's rarest, of several the last."""
    mask_token = options.mask_token
    if mask_token is None:
        counts = np.bincount(tokens, minlength=target_vocab)
        return int(target_vocab - 1 - np.argmin(counts[::-1]))
    if mask_token >= target_vocab:
        raise SpecbuildError(
            f"train draft: mask_token is {mask_token}, expected a token below the target's "
            f"vocabulary of {target_vocab}"
        )
    return mask_token


def _objective(
    options: TrainOptions, kind: DraftKind, model: PreTrainedModel, vocabulary: DraftVocabulary
) -> Objective:
    return Objective(
        ttt_steps=options.ttt_steps,
        decay=kind.decay(options) if options.decay is None else options.decay,
        target_ids=vocabulary.target_ids.to(options.device),
        in_draft_vocab=vocabulary.t2d.to(options.device),
        token_weights=TokenWeights(model.model.embed_tokens.weight, model.lm_head.weight),
        hard=kind.hard,
        lk=options.lk if options.lk.lk_loss_type else None,
    )
