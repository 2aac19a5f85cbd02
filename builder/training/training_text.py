"""Reads the text of a training, and its held-out part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.builder.training.corpus import Rows, TrainingText, cut_rows, pack, split_documents
from specbuild.builder.training.documents import DocumentReader
from specbuild.builder.training.frozen_target import end_of_text_ids
from specbuild.builder.training.options import TrainingOptions
from specbuild.builder.training.self_text import no_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_training_text(
    options: TrainingOptions, model: PreTrainedModel
) -> tuple[TrainingText, Rows]:
    """Return the training text and held-out rows; SpecbuildError for text that cannot be read."""
    end_of_text = end_of_text_ids(model)
    reader = DocumentReader(options.model, vocab=model.config.vocab_size, end_of_text=end_of_text)
    documents = reader.read(options.texts)
    if options.held_out:
        training, held_out = documents, reader.read(options.held_out)
    else:
        fraction = options.held_out_fraction
        training, held_out = split_documents(documents, fraction=fraction, seed=options.seed)
    length = options.sequence_length
    text = TrainingText(pack(training, end_of_text), no_rows(length), length, options.seed)
    return text, cut_rows(pack(held_out, end_of_text), length, options.held_out_rows)
