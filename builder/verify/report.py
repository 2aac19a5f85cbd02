"""The report of ``verify``, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyRow:
    """One stage of the engine against the reference, over all rows of all launches.

    ``cosine`` is the worst row's. ``max_error`` is the largest difference: for hidden states
    relative to the largest magnitude in the row, for logits absolute. ``argmax_agreement`` and
    ``topk_agreement`` are shares, for logits only.
    """

    stage: str
    rows: int
    cosine: float
    max_error: float
    argmax_agreement: float | None
    topk_agreement: float | None
    threshold: str
    passed: bool


@dataclass(frozen=True)
class LosslessRow:
    """Two ways of decoding the same prompts, token for token.

    ``differences`` counts prompts that differ at a clear choice, ``near_ties`` those that differ
    where the two best choices are closer than the engine's precision.
    """

    name: str
    prompts: int
    tokens: int
    differences: int
    near_ties: int
    passed: bool


@dataclass(frozen=True)
class VerifyReport:
    """All rows, and whether every threshold is met."""

    rows: tuple[VerifyRow, ...]
    losslessness: tuple[LosslessRow, ...]
    passed: bool
