"""What a retrofit says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerErrors:
    """One layer: its rank, and relative Frobenius errors of its keys' and values' projections.

    The ``output`` errors are those of the keys and values themselves on calibration text.
    """

    layer: int
    rank: int
    key_error: float
    value_error: float
    key_output_error: float | None
    value_output_error: float | None


@dataclass(frozen=True)
class LatentReport:
    """``bytes_per_token`` count the caches of all layers in the checkpoint's own type.

    Perplexities are those of ``evaluated_tokens`` predictions; None where no text was given.
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
