"""The report of a retrofit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerErrors:
    """A layer's rank, and relative Frobenius errors of its key and value projections.

    The ``output`` errors are those of keys and values on the calibration text.
    """

    layer: int
    rank: int
    key_error: float
    value_error: float
    key_output_error: float | None
    value_output_error: float | None


@dataclass(frozen=True)
class LatentReport:
    """``bytes_per_token`` are those of all layers' caches in the checkpoint's type.

    Perplexities are those of ``evaluated_tokens`` predictions; None without text.
    """

    file: str
    method: Literal["svd", "calibrated"]
    mean_rank: float
    layers: tuple[LayerErrors, ...]
    bytes_per_token_before: int
    bytes_per_token_after: int
    calibrated_tokens: int
    evaluated_tokens: int
    perplexity_before: float | None
    perplexity_after: float | None
