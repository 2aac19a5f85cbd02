"""Training a draft for a target: read → (let the target write) → train → write."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specbuild.builder.progress import Progress
from specbuild.builder.training.config import (
    SelfText,
    TrainOptions,
)
from specbuild.builder.training.corpus import (
    Rows,
    Stream,
    TrainingText,
)
from specbuild.builder.training.evaluation import Examiner
from specbuild.builder.training.frozen_target import (
    end_of_text_ids,
    load_target,
)
from specbuild.builder.training.output import TrainReport, write_report
from specbuild.builder.training.prepare import draft_shape, draft_words, prepare, write_trained
from specbuild.builder.training.run_state import RunFolder
from specbuild.builder.training.self_text import no_rows, write_rows
from specbuild.builder.training.training_loop import TrainingRun, restore, train
from specbuild.builder.training.training_text import read_training_text
from specbuild.builder.training.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    shape = draft_shape(options, model)
    text, held_out = read_training_text(options, model)
    own, held_out_own = _self_text(folder, options, model, (text, held_out), progress)
    text = replace(text, self_text=own)
    tokens = np.concatenate([text.stream.ids, own.ids[:, 1:][own.counted[:, :-1]]])
    words = draft_words(options, tokens, shape, model.config.vocab_size)
    run = prepare(options, model, shape, words, text)
    restore(run, folder.load())
    progress.note(
        f"{sum(p.numel() for p in run.draft.parameters()):,} parameters, "
        f"{len(text.stream.ids):,} tokens of text and {own.ids.size:,} of the target's own; "
        f"the draft vocabulary covers {words.vocabulary.coverage:.1%}"
    )
    finished = train(run, folder, progress, started_s)
    report = _report(run, words.vocabulary, finished, (held_out, held_out_own))
    if finished:
        positions = min(model.config.max_position_embeddings, options.sequence_length)

        def write(path: Path) -> None:
            write_trained(path, run, words, positions)
            write_report(path, report)

        folder.publish(write, options.output)
    return report


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
