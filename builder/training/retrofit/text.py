"""The text that a retrofit reads: rows to calibrate on, and rows to judge by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.training.corpus import cut_rows, pack, split_documents
from specbuild.builder.training.documents import Document, DocumentReader
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.runtime.errors import SpecbuildError

# Of the calibration text, where no other is given to judge by.
HELD_OUT = 0.2
MAX_EVALUATED_TOKENS = 16384


@dataclass(frozen=True)
class RetrofitText:
    """Token ids [N, T] each; ``calibration`` None for a plain SVD, ``evaluation`` None for none."""

    calibration: torch.Tensor | None
    evaluation: torch.Tensor | None


def read_text(options: LatentOptions, target: TargetCheckpoint) -> RetrofitText:
    """Reads what the options name; SpecbuildError where it is too short for its purpose."""
    g = target.geometry
    reader = DocumentReader(options.model, vocab=g.vocab, end_of_text=g.eos_token_ids)
    calibration = reader.read(options.calibration) if options.calibration else []
    if options.evaluation:
        evaluation = reader.read(options.evaluation)
    else:
        calibration, evaluation = split_documents(calibration, fraction=HELD_OUT, seed=0)
    judged = _rows(evaluation, options, g.eos_token_ids, MAX_EVALUATED_TOKENS)
    if options.evaluation and judged is None:
        raise SpecbuildError(
            f"--evaluation: the text has fewer tokens than one sequence of "
            f"{options.sequence_length}; give more, or a smaller --sequence-length"
        )
    if not options.calibration:
        return RetrofitText(None, judged)
    rows = _rows(calibration, options, g.eos_token_ids, options.tokens)
    tokens = 0 if rows is None else rows.numel()
    if tokens < g.hidden:
        raise SpecbuildError(
            f"--calibration: {tokens} tokens in whole sequences of {options.sequence_length}, "
            f"expected at least the model's hidden size of {g.hidden}; give more text, more "
            "--tokens, or a smaller --sequence-length"
        )
    return RetrofitText(rows, judged)


def _rows(
    documents: list[Document], options: LatentOptions, end_of_text: tuple[int, ...], most: int
) -> torch.Tensor | None:
    stream = pack([d for d in documents if len(d.ids)], end_of_text)
    length = options.sequence_length
    if len(stream.ids) < length:
        return None
    rows = cut_rows(stream, length, max(1, most // length))
    return torch.from_numpy(rows.ids).long()
