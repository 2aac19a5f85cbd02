"""Training text as sequences of one length.

Documents are packed one after another, each closed by the end-of-text id; attention does not stop
at their borders, just as in the target's own context. Rows that the target wrote itself stand
alone, so that their context is the one in which they were written.
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
    """Packed documents: ``ids`` int32 [n], and ``counted`` bool [n] where the prediction made
    after a token counts."""

    ids: np.ndarray
    counted: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Whole sequences: ``ids`` int32 [N, T] and ``counted`` bool [N, T]."""

    ids: np.ndarray
    counted: np.ndarray

    def batch(self, rows: slice, device: str) -> Batch:
        """These rows as tensors."""
        return _batch(self.ids[rows], self.counted[rows], device)


def split_documents(
    documents: list[Document], *, fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Documents to train on and documents to keep apart, about ``fraction`` of the tokens.

    A single document is cut, its end kept apart.
    """
    if fraction == 0:
        return documents, []
    if len(documents) == 1:
        [only] = documents
        cut = round(len(only.ids) * (1 - fraction))
        end = Document(only.ids[cut:], max(1, only.loss_from - cut))
        return [Document(only.ids[:cut], only.loss_from)], [end]
    order = np.random.default_rng(seed).permutation(len(documents))
    wanted = fraction * sum(len(document.ids) for document in documents)
    kept: list[int] = []
    held_out: list[int] = []
    tokens = 0
    for position, index in enumerate(order):
        last = position == len(order) - 1
        if tokens < wanted and not (last and not kept):
            held_out.append(int(index))
            tokens += len(documents[index].ids)
        else:
            kept.append(int(index))
    return [documents[i] for i in sorted(kept)], [documents[i] for i in sorted(held_out)]


def pack(documents: list[Document], end_of_text: tuple[int, ...]) -> Stream:
    """One stream; a document that does not end in an end-of-text id gets the first of them."""
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


def cut_rows(stream: Stream, length: int, most: int) -> Rows:
    """Up to ``most`` consecutive rows of ``length``, spread evenly over the stream."""
    available = len(stream.ids) // length
    chosen = np.unique(np.linspace(0, available - 1, min(most, available)).round().astype(int))
    index = chosen[:, None] * length + np.arange(length)
    return Rows(stream.ids[index], stream.counted[index])


@dataclass(frozen=True)
class TrainingText:
    """What batches are drawn from: a stream, and rows that the target wrote."""

    stream: Stream
    self_text: Rows
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.stream.ids) < self.length:
            raise SpecbuildError(
                f"train: the text has {len(self.stream.ids)} tokens to train on, expected at "
                f"least one sequence of {self.length}"
            )

    def batch(self, step: int, size: int, device: str) -> Batch:
        """The batch of a step, drawn anew from (seed, step), so that training can resume.

        A row comes from the target's own text in proportion to its share of the tokens.
        """
        random = np.random.default_rng((self.seed, step))
        own = self.self_text.ids
        from_self = random.random(size) < own.size / (own.size + len(self.stream.ids))
        starts = random.integers(0, len(self.stream.ids) - self.length + 1, size)
        index = starts[:, None] + np.arange(self.length)
        ids, counted = self.stream.ids[index], self.stream.counted[index]
        if from_self.any():
            rows = random.integers(0, len(own), size)[from_self]
            ids[from_self] = own[rows]
            counted[from_self] = self.self_text.counted[rows]
        return _batch(ids, counted, device)


def _batch(ids: np.ndarray, counted: np.ndarray, device: str) -> Batch:
    parts = [torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(counted)]
    if device.startswith("cuda"):  # a copy from pinned memory waits for nothing
        parts = [part.pin_memory() for part in parts]
    return Batch(*(part.to(device, non_blocking=True) for part in parts))
