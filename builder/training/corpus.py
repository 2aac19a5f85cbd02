"""Training text as sequences of one length.

Documents are concatenated, each with an end-of-text id at its end. Attention crosses document
borders, as in the target's own context. Rows that the target generated are not concatenated, so
their context is the one in which they were generated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specbuild.builder.training.documents import Document
from specbuild.builder.training.objective import Batch
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class Stream:
    """Concatenated documents: ``ids`` int32 [n], and ``counted`` bool [n].

    ``counted`` is true where the prediction after a token counts.
    """

    ids: np.ndarray
    counted: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Full sequences: ``ids`` int32 [N, T] and ``counted`` bool [N, T]."""

    ids: np.ndarray
    counted: np.ndarray

    def batch(self, rows: slice, device: str) -> Batch:
        """Return these rows as tensors."""
        return _batch(self.ids[rows], self.counted[rows], device)


def split_documents(
    documents: list[Document], *, fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Return training documents and held-out documents with about ``fraction`` of the tokens.

    A single document is cut, and its end is held out.
    """
    if fraction == 0:
        return documents, []
    if len(documents) == 1:
        [single] = documents
        cut = round(len(single.ids) * (1 - fraction))
        end = Document(single.ids[cut:], max(1, single.loss_from - cut))
        return [Document(single.ids[:cut], single.loss_from)], [end]
    order = np.random.default_rng(seed).permutation(len(documents))
    held_out_tokens = fraction * sum(len(document.ids) for document in documents)
    training: list[int] = []
    held_out: list[int] = []
    tokens = 0
    for position, index in enumerate(order):
        is_last = position == len(order) - 1
        if tokens < held_out_tokens and not (is_last and not training):
            held_out.append(int(index))
            tokens += len(documents[index].ids)
        else:
            training.append(int(index))
    return [documents[i] for i in sorted(training)], [documents[i] for i in sorted(held_out)]


def pack(documents: list[Document], end_of_text: tuple[int, ...]) -> Stream:
    """Concatenate documents; append the first end-of-text id to those that end in none."""
    ids, counted = [], []
    for document in documents:
        tokens = document.ids
        if len(tokens) == 0:
            continue
        if end_of_text and tokens[-1] not in end_of_text:
            tokens = np.append(tokens, np.int32(end_of_text[0]))
        ids.append(tokens)
        counted.append(np.arange(len(tokens)) >= document.loss_from - 1)
    if not ids:
        return Stream(np.empty(0, np.int32), np.empty(0, bool))
    return Stream(np.concatenate(ids), np.concatenate(counted))


def cut_rows(stream: Stream, length: int, max_rows: int) -> Rows:
    """Return up to ``max_rows`` consecutive rows of ``length``, spread evenly over the stream."""
    available = len(stream.ids) // length
    rows = np.unique(np.linspace(0, available - 1, min(max_rows, available)).round().astype(int))
    index = rows[:, None] * length + np.arange(length)
    return Rows(stream.ids[index], stream.counted[index])


@dataclass(frozen=True)
class TrainingText:
    """The source of batches: a stream, and rows that the target generated."""

    stream: Stream
    self_text: Rows
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.stream.ids) < self.length:
            raise SpecbuildError(
                f"train: the text has {len(self.stream.ids)} training tokens, expected at least "
                f"one sequence of {self.length}"
            )

    def batch(self, step: int, size: int, device: str) -> Batch:
        """Return the batch of a step. It depends on (seed, step) only, so training can resume.

        The share of rows that the target generated is their share of the tokens.
        """
        random = np.random.default_rng((self.seed, step))
        generated = self.self_text.ids
        is_generated = random.random(size) < generated.size / (
            generated.size + len(self.stream.ids)
        )
        starts = random.integers(0, len(self.stream.ids) - self.length + 1, size)
        index = starts[:, None] + np.arange(self.length)
        ids, counted = self.stream.ids[index], self.stream.counted[index]
        if is_generated.any():
            rows = random.integers(0, len(generated), size)[is_generated]
            ids[is_generated] = generated[rows]
            counted[is_generated] = self.self_text.counted[rows]
        return _batch(ids, counted, device)


def _batch(ids: np.ndarray, counted: np.ndarray, device: str) -> Batch:
    parts = [torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(counted)]
    if device.startswith("cuda"):  # a copy from pinned memory is asynchronous
        parts = [part.pin_memory() for part in parts]
    return Batch(*(part.to(device, non_blocking=True) for part in parts))
