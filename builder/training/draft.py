"""Training a draft for a target: read → (let the target write) → train → write."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbuild.builder.families.eagle3.checkpoint import default_aux_layers
from specbuild.builder.progress import Progress
from specbuild.builder.training.config import (
    INNER_PER_HIDDEN,
    LARGEST_DRAFT_VOCAB,
    SelfText,
    TrainOptions,
)
from specbuild.builder.training.corpus import (
    Rows,
    Stream,
    TrainingText,
)
from specbuild.builder.training.draft_kinds import (
    DraftKind,
    draft_tensors,
    kind_of,
    layer_config,
)
from specbuild.builder.training.draft_layers import DraftShape, Words
from specbuild.builder.training.evaluation import Examiner
from specbuild.builder.training.frozen_target import (
    FrozenTarget,
    end_of_text_ids,
    load_target,
)
from specbuild.builder.training.initial_draft import begin_from, initial_vocabulary
from specbuild.builder.training.objective import Objective
from specbuild.builder.training.output import TrainReport, write_draft, write_report
from specbuild.builder.training.run_state import RunFolder
from specbuild.builder.training.self_text import no_rows, write_rows
from specbuild.builder.training.training_loop import TrainingRun, restore, train
from specbuild.builder.training.training_text import read_training_text
from specbuild.builder.training.vocabulary import DraftVocabulary, choose_vocabulary
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETAS = (0.9, 0.95)
# What does not change the result of a run, and may differ when it is resumed.
FREE_OPTIONS = ("output", "save_every", "resume", "time_limit_s")
UNREPORTED_OPTIONS = (*FREE_OPTIONS, "model", "texts", "held_out", "initial", "device")


def train_draft(options: TrainOptions, progress: Progress) -> TrainReport:
    """Train a draft and write it to ``options.output``, in Hugging Face format.

    Ended by its time limit, it writes no draft; the same options with ``resume`` go on.

    Raises:
        SpecbuildError: options, text or target do not do, the output exists, the loss diverges.
    """
    started_s = time.monotonic()
    folder = RunFolder.open(
        options.output, fingerprint=_fingerprint(options), resume=options.resume
    )
    try:
        return _train_in(folder, options, progress, started_s)
    finally:
        folder.remove_unbegun()


def _train_in(
    folder: RunFolder, options: TrainOptions, progress: Progress, started_s: float
) -> TrainReport:
    model = load_target(options.model, device=options.device, dtype=options.dtype)
    shape = _draft_shape(options, model)
    text, held_out = read_training_text(options, model)
    own, held_out_own = _self_text(folder, options, model, (text, held_out), progress)
    text = replace(text, self_text=own)
    tokens = np.concatenate([text.stream.ids, own.ids[:, 1:][own.counted[:, :-1]]])
    vocabulary = _vocabulary(options, tokens, model.config.vocab_size, shape.vocab)
    mask = _mask_token(options, tokens, model.config.vocab_size)
    run = _prepare(options, model, shape, text, vocabulary, mask)
    restore(run, folder.load())
    progress.note(
        f"{sum(p.numel() for p in run.draft.parameters()):,} parameters, "
        f"{len(text.stream.ids):,} tokens of text and {own.ids.size:,} of the target's own; "
        f"the draft vocabulary covers {vocabulary.coverage:.1%}"
    )
    finished = train(run, folder, progress, started_s)
    report = _report(run, vocabulary, finished, (held_out, held_out_own))
    if finished:
        positions = min(model.config.max_position_embeddings, options.sequence_length)

        def write(path: Path) -> None:
            kind, vocab = kind_of(options), model.config.vocab_size
            config = kind.config(shape, options, mask) | layer_config(shape, vocab, positions)
            tensors = draft_tensors(run.draft, vocabulary, own_vocabulary=kind.own_vocabulary)
            write_draft(path, config, tensors)
            write_report(path, report)

        folder.publish(write, options.output)
    return report


def _draft_shape(options: TrainOptions, model: PreTrainedModel) -> DraftShape:
    config = model.config
    aux_layers = options.aux_layers or default_aux_layers(config.num_hidden_layers)
    wrong = [aux_layer for aux_layer in aux_layers if not 0 <= aux_layer < config.num_hidden_layers]
    if wrong:
        raise SpecbuildError(
            f"train draft: aux layer {wrong[0]} is no layer of the target, expected 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    if options.draft_vocab is not None and options.draft_vocab > config.vocab_size:
        raise SpecbuildError(
            f"train draft: draft_vocab is {options.draft_vocab}, expected at most the target's "
            f"{config.vocab_size}"
        )
    shape = DraftShape(
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        aux_layers=tuple(aux_layers),
        vocab=_vocab(options, config.vocab_size),
        inner=options.inner or INNER_PER_HIDDEN * config.hidden_size,
        q_heads=options.q_heads or config.num_attention_heads,
        kv_heads=options.kv_heads or config.num_key_value_heads,
        head_dim=options.head_dim or config.head_dim,
        rope_theta=options.rope_theta,
        rms_eps=config.rms_norm_eps,
        layers=options.layers,
    )
    if shape.q_heads % shape.kv_heads:
        raise SpecbuildError(
            f"train draft: q_heads {shape.q_heads} is no multiple of kv_heads {shape.kv_heads}"
        )
    return shape


def _vocab(options: TrainOptions, target_vocab: int) -> int:
    """How many tokens the draft can say."""
    if not kind_of(options).own_vocabulary:
        return target_vocab
    return options.draft_vocab or min(target_vocab, LARGEST_DRAFT_VOCAB)


def _vocabulary(
    options: TrainOptions, tokens: np.ndarray, target_vocab: int, size: int
) -> DraftVocabulary:
    """That of the draft to begin from, or the tokens that the text uses most."""
    found = None
    if options.initial is not None and kind_of(options).own_vocabulary:
        found = initial_vocabulary(options.initial, tokens, target_vocab=target_vocab, size=size)
    return found or choose_vocabulary(tokens, target_vocab=target_vocab, size=size)


def _mask_token(options: TrainOptions, tokens: np.ndarray, target_vocab: int) -> int:
    """The token of rows that have none: the one that the text has least, of several the last."""
    asked = options.mask_token
    if asked is None:
        counts = np.bincount(tokens, minlength=target_vocab)
        return int(target_vocab - 1 - np.argmin(counts[::-1]))
    if asked >= target_vocab:
        raise SpecbuildError(
            f"train draft: mask_token is {asked}, expected a token below the target's "
            f"vocabulary of {target_vocab}"
        )
    return asked


def _self_text(
    folder: RunFolder,
    options: TrainOptions,
    model: PreTrainedModel,
    texts: tuple[TrainingText, Rows],
    progress: Progress,
) -> tuple[Rows, Rows]:
    """Rows to train on, and greedy rows to measure on, from prompts of the held-out text."""
    length, wish = options.sequence_length, options.self_text
    if not wish.count:
        return no_rows(length), no_rows(length)
    text, held_out = texts

    def rows(name: str, stream: Stream, wanted: SelfText, seed: int) -> Rows:
        return folder.rows(
            name,
            lambda: write_rows(
                model,
                stream,
                wanted,
                length=length,
                stop=end_of_text_ids(model),
                seed=seed,
                progress=progress,
            ),
        )

    own = rows("self-text", text.stream, wish, options.seed)
    if not len(held_out.ids):
        return own, no_rows(length)
    kept_apart = Stream(held_out.ids.ravel(), held_out.counted.ravel())
    greedy = replace(wish, count=min(wish.count, options.held_out_rows), temperature=0.0)
    return own, rows("self-text-held-out", kept_apart, greedy, options.seed + 1)


def _prepare(  # noqa: PLR0917
    options: TrainOptions,
    model: PreTrainedModel,
    shape: DraftShape,
    text: TrainingText,
    vocabulary: DraftVocabulary,
    mask: int,
) -> TrainingRun:
    kind = kind_of(options)
    draft: Any = kind.make(shape, options, mask)
    draft.initialise(torch.Generator().manual_seed(options.seed))
    with torch.no_grad():  # the target's own head is where the draft's begins
        if kind.own_vocabulary:
            draft.lm_head.weight.copy_(model.lm_head.weight[vocabulary.target_ids].float())
        draft.norm.weight.copy_(model.model.norm.weight.float())
    if options.initial is not None:
        begin_from(options.initial, draft)
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
        objective=_objective(options, kind, model, vocabulary),
        text=text,
        autocast=autocast,
    )


def _objective(
    options: TrainOptions, kind: DraftKind, model: PreTrainedModel, vocabulary: DraftVocabulary
) -> Objective:
    return Objective(
        ttt_steps=options.ttt_steps,
        decay=kind.decay(options) if options.decay is None else options.decay,
        target_ids=vocabulary.target_ids.to(options.device),
        known=vocabulary.t2d.to(options.device),
        words=Words(model.model.embed_tokens.weight, model.lm_head.weight),
        hard=kind.hard,
        lk=options.lk if options.lk.lk_loss_type else None,
    )


def _report(
    run: TrainingRun, vocabulary: DraftVocabulary, finished: bool, held_out: tuple[Rows, Rows]
) -> TrainReport:
    examiner = Examiner(
        run.target, run.objective, run.options.device, run.options.batch_size, run.autocast
    )
    measured = [examiner.acceptance(run.draft, rows) if finished else None for rows in held_out]
    return TrainReport(
        finished=finished,
        steps=run.step,
        parameters=sum(p.numel() for p in run.draft.parameters()),
        training_tokens=len(run.text.stream.ids),
        self_text_rows=len(run.text.self_text.ids),
        vocabulary_coverage=vocabulary.coverage,
        losses=tuple(run.points),
        held_out_text=measured[0],
        held_out_self_text=measured[1],
        options={
            name: value
            for name, value in asdict(run.options).items()
            if name not in UNREPORTED_OPTIONS
        },
    )


def _fingerprint(options: TrainOptions) -> str:
    values = {k: v for k, v in asdict(options).items() if k not in FREE_OPTIONS}
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()
