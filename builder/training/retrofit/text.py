"""The text of a retrofit: rows for calibration and rows for evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.training.corpus import cut_rows, pack, split_documents
from specbuild.builder.training.documents import Document, DocumentReader
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.runtime.errors import SpecbuildError

# The share of the calibration text for evaluation, if there is no evaluation text.
HELD_OUT = 0.2
MAX_EVALUATED_TOKENS = 16384


@dataclass(frozen=True)
class RetrofitText:
    """Token ids [N, T] each; without ``calibration`` the factorization is a plain SVD."""

    calibration: torch.Tensor | None
    evaluation: torch.Tensor | None


def read_text(options: LatentOptions, target: TargetCheckpoint) -> RetrofitText:
    """Read the text of the options; SpecbuildError if it is too short."""
    g = target.geometry
    reader = DocumentReader(options.model, vocab=g.vocab, end_of_text=g.eos_token_ids)
    calibration = reader.read(options.calibration) if options.calibration else []
    if options.evaluation:
        evaluation = reader.read(options.evaluation)
    else:
        calibration, evaluation = split_documents(calibration, fraction=HELD_OUT, seed=0)
    evaluation_rows = _rows(evaluation, options, g.eos_token_ids, MAX_EVALUATED_TOKENS)
    if options.evaluation and evaluation_rows is None:
        raise SpecbuildError(
            f"--evaluation: the text has fewer tokens than one sequence of "
            f"{options.sequence_length}; use more text or a smaller --sequence-length"
        )
    if not options.calibration:
        return RetrofitText(None, evaluation_rows)
    rows = _rows(calibration, options, g.eos_token_ids, options.tokens)
    tokens = 0 if rows is None else rows.numel()
    if tokens < g.hidden:
        raise SpecbuildError(
            f"--calibration: {tokens} tokens in whole sequences of {options.sequence_length}, "
            f"expected at least the model's hidden size of {g.hidden}; use more text, more "
            "--tokens, or a smaller --sequence-length"
        )
    return RetrofitText(rows, evaluation_rows)


def _rows(
    documents: list[Document], options: LatentOptions, end_of_text: tuple[int, ...], max_tokens: int
) -> torch.Tensor | None:
    stream = pack([d for d in documents if len(d.ids)], end_of_text)
    length = options.sequence_length
    if len(stream.ids) < length:
        return None
    rows = cut_rows(stream, length, max(1, max_tokens // length))
    return torch.from_numpy(rows.ids).long()
